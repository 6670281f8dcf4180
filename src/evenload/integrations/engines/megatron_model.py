"""A Megatron-Core model in the terms of our cost model, so that packs are balanced for the model that is trained."""

import logging
from typing import Any

from evenload.errors import ConfigError
from evenload.integrations.packed_loader import PackedLoader
from evenload.types.model import ModelSpec

_log = logging.getLogger("evenload.loader")


def balance_for_megatron(loader: PackedLoader, model: Any, config: Any) -> None:
    """Balance the packs for a model; a warning where its costs are not known. Nothing happens to a loader that was made
    with a model. Collective over the loader's ranks.

    Args:
        model: a stage of a `GPTModel`, wrapped or not; config: its `TransformerConfig`.
    """
    if not loader.model_is_assumed:
        return
    try:
        spec = model_of(_unwrapped(model), config)
    except ConfigError as err:
        if loader.rank == 0:
            _log.warning("packs are not balanced for the model that is trained: %s", err)
    else:
        loader.balance_for(spec)


def model_of(model: Any, config: Any) -> ModelSpec:
    """The shape of a dense `GPTModel`, of all its stages.

    Args:
        model: knows the vocabulary and the positions; config: its `TransformerConfig`.

    Raises:
        ConfigError: another kind of model, or layers of a kind that is not priced.
    """
    fix = "name the model for which packs are balanced: PackedLoader(model=...)"
    for name in ("vocab_size", "share_embeddings_and_output_weights", "position_embedding_type", "max_sequence_length"):
        if not hasattr(model, name):
            raise ConfigError(f"{type(model).__name__} has no {name}, so it is no GPTModel of Megatron-Core; {fix}")
    for name in ("num_moe_experts", "multi_latent_attention", "window_size", "heterogeneous_block_specs"):
        if getattr(config, name, None):
            raise ConfigError(f"{name} of Megatron-Core's configuration is {getattr(config, name)}; {fix}")
    return ModelSpec(
        name="megatron",
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_query_groups,
        head_dim=config.kv_channels,
        ffn_hidden_size=config.ffn_hidden_size,
        vocab_size=model.vocab_size,
        tied_embeddings=model.share_embeddings_and_output_weights,
        gated_ffn=config.gated_linear_unit,
        biases=config.add_bias_linear,
        position_rows=model.max_sequence_length if model.position_embedding_type == "learned_absolute" else 0,
        bytes_per_element=2 if config.bf16 or config.fp16 else 4,
    )


def _unwrapped(model: Any) -> Any:
    """Below Megatron's wrappers (`DistributedDataParallel`, `Float16Module`), each of which has a `module`."""
    while hasattr(model, "module"):
        model = model.module
    return model
