"""Read what planning needs of any decoder of transformers from the model itself: `described`.

The model is made on the meta device, without memory, and its own forward runs on a few tokens, as in
`runtime.model.structure`, whose survey says what backward reads. Of every layer the products, attention, experts and
weights are noted; layers alike in all of that are of one kind.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from msgspec.structs import replace
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, PretrainedConfig

from evenload.errors import ConfigError
from evenload.runtime.model.structure import LayerNotes, Survey, block_of
from evenload.types.layer_kind import ExpertsKind, LayerKind
from evenload.types.model import ModelSpec


def described(tree: Mapping[str, Any], name: str) -> ModelSpec:
    """Return a model from its parsed `config.json`, of a model of text and pictures its text part; `ConfigError` where
    transformers does not build a decoder from it that runs layer by layer."""
    try:
        config = AutoConfig.for_model(**tree)
    except Exception as error:  # transformers has no common class
        why = " ".join(str(error).split())
        raise ConfigError(f"model {name}: transformers makes no configuration of config.json ({why})") from error
    return describe(config, name)


def text_part(config: PretrainedConfig) -> PretrainedConfig:
    """Return the configuration of a decoder: of a model of text and pictures its text part's."""
    text = config.get_text_config(decoder=True)
    if text is config or type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return config
    tied = getattr(config, "tie_word_embeddings", text.tie_word_embeddings)
    return type(text).from_dict(text.to_dict() | {"tie_word_embeddings": tied})


def describe(config: PretrainedConfig, name: str) -> ModelSpec:
    """Return a model from transformers' configuration, as `described`."""
    text = text_part(config)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(text, dtype=torch.bfloat16)
        survey = Survey(model.train())
        survey.run()
        return _spec(model, survey, name)
    except Exception as error:  # of transformers, and of the model's own code on tensors without values
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise ConfigError(
            f"model {name}: what layers of model_type '{text.model_type}' compute cannot be told from transformers' "
            f"model ({why}); compare config.json with the published one, or plan a built-in model that comes closest"
        ) from error


def _spec(model: Any, survey: Survey, name: str) -> ModelSpec:
    of_layers = [_kind(index, notes, survey.whole.layers[index]) for index, notes in enumerate(survey.notes)]
    kinds = tuple(dict.fromkeys(of_layers))
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    is_tied, of_embedding = head is embedding, head.numel()
    modules = [model.get_submodule(path) for path in survey.prologue]
    before = {id(one): one.numel() for module in modules for one in module.parameters(recurse=False)}
    positions = sum(before.values()) - of_embedding
    rows = [one.num_embeddings for one in modules if isinstance(one, nn.Embedding) and one.weight is not embedding]
    longest = getattr(model.config, "max_position_embeddings", 0)
    others = sum(one.numel() for one in model.parameters()) - sum(kind.parameters for kind in of_layers)
    return ModelSpec(
        name=name,
        hidden_size=survey.hidden_size,
        vocab_size=of_embedding // survey.hidden_size,
        kinds=kinds,
        layers=tuple(kinds.index(kind) for kind in of_layers),
        norm_parameters=others - (1 if is_tied else 2) * of_embedding - positions,
        tied_embeddings=is_tied,
        position_parameters=positions,
        tensor_refusal=survey.tensor_cut("").refusal,
        position_rows=longest if any(longest <= one <= longest + 2 for one in rows) else 0,
    )


def _kind(index: int, notes: LayerNotes, layer: nn.Module) -> LayerKind:
    sites = notes.sites()
    kept = sites.linears - sites.unused
    products = tuple(
        replace(one, is_read=owner in kept and not notes.is_mixed(owner), in_mixer=notes.is_mixed(owner))
        for owner, _, one in notes.products
    )
    experts = _experts(notes, is_read=not sites.experts <= sites.unused)
    parameters = sum(one.numel() for one in layer.parameters())
    matrices = sum({owner: one.parameters for owner, _, one in notes.products}.values())
    divided = matrices + notes.divided_biases + (experts.count * experts.parameters if experts else 0)
    if 2 * divided < parameters:
        raise ValueError(f"most weights of layer {index} take part in no product of every token")
    # A linear alone in its module, such as the gate of a shared expert, is no block.
    of_blocks = Counter(block_of(owner) for owner, _, _ in notes.products)
    attention = None
    if notes.attention:
        # Two calls of attention in a layer (LongCat) are one of as many heads.
        (_, first), count = notes.attention[0], len(notes.attention)
        is_kept = not notes.is_mixed(notes.attention[-1][0])
        attention = replace(first, heads=count * first.heads, kv_heads=count * first.kv_heads, is_kept=is_kept)
    return LayerKind(
        products=products,
        parameters=parameters,
        copied_parameters=parameters - divided,
        attention=attention,
        experts=experts,
        mixer=notes.mixer,
        blocks=sum(count > 1 for count in of_blocks.values()),
        biases=notes.has_row_biases,
    )


def _experts(notes: LayerNotes, *, is_read: bool) -> ExpertsKind | None:
    if notes.experts:
        experts = [*notes.experts.values()][-1]
    elif notes.stacked:
        (count, width, outputs), inner = notes.stacked[0].shape, notes.stacked[-1].shape[1]
        gated = outputs == 2 * inner
        experts = ExpertsKind(count=count, chosen=notes.chosen, width=width, inner=inner, gated=gated)
    else:
        return None
    choices = sum(count for path, count in notes.choices if not notes.is_mixed(path))
    return replace(experts, is_read=is_read, router=notes.router, cast_router=notes.cast_router, choices=choices)
