"""`check_packing`: which ways of packing documents keep them apart, on a narrowed copy of a transformers model.

Two documents go through the model as trainers give them: in one row with positions that start again, with cumulative
lengths too (flash attention, DeltaNet kernels), with `seq_idx` too (kernels of convolutions and state spaces), and in a
row each. Random weights, float64, on the CPU: what kernels on a GPU make of the same arguments is not seen here.
"""

from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers import __version__ as transformers_version

from evenload.check.smaller_run import Verdict, judged, skipped
from evenload.errors import ConfigError
from evenload.integrations.isolation import check_isolation
from evenload.runtime.model.around import find_layers
from evenload.runtime.model.narrow import Float64Casts, build_narrow, narrowed

_LENGTHS = (13, 9)  # longer than windows of narrowed attention
POSITIONS, EDGES, INDEX, ROWS = "position_ids", "+ cu_seq_lens", "+ seq_idx", "a document a row"


def packings(vocab_size: int) -> dict[str, dict[str, Any]]:
    """Return the batches by the name of their way."""
    first, second = _LENGTHS
    ids = torch.arange(1, sum(_LENGTHS) + 1) % vocab_size
    positions = {"input_ids": ids[None], "position_ids": torch.cat([torch.arange(first), torch.arange(second)])[None]}
    edges = torch.tensor([0, first, first + second], dtype=torch.int32)
    lengths = {"cu_seq_lens_q": edges, "cu_seq_lens_k": edges, "max_length_q": first, "max_length_k": first}
    index = {"seq_idx": torch.tensor([[0] * first + [1] * second], dtype=torch.int32)}
    rows = torch.stack([ids[:first], torch.nn.functional.pad(ids[first:], (0, first - second))])
    mask = torch.tensor([[1] * first, [1] * second + [0] * (first - second)])
    ways = {
        POSITIONS: positions,
        EDGES: positions | lengths,
        INDEX: positions | lengths | index,
        ROWS: {"input_ids": rows, "attention_mask": mask},
    }
    # With a cache transformers does not notice that positions start again.
    return {name: batch | {"use_cache": False} for name, batch in ways.items()}


def check_packing(config: PretrainedConfig, attention: str) -> tuple[str, list[Verdict]]:
    """Return the answer in a line, and what was found of every way: one that transformers itself refuses is skipped.

    Raises a `ConfigError` for an attention that the model does not have.
    """
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise ConfigError(f"{config.model_type} is no causal language model of transformers {transformers_version}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build_narrow(narrowed(config))
        try:
            model.set_attn_implementation(attention)
        except (ValueError, ImportError) as error:
            other = "" if attention == "eager" else "; try --attention eager"
            raise ConfigError(f"--attention {attention}: {str(error).splitlines()[0]}{other}") from error
    layers: Any = model.get_submodule(find_layers(model))
    kinds = [frozenset(map(type, layer.modules())) for layer in layers]
    # From the first on, as a configuration names layers by their place; over many, rounding would grow.
    del layers[max(map(kinds.index, kinds)) + 1 :]
    verdicts: list[Verdict] = []
    for name, batch in packings(model.config.get_text_config().vocab_size).items():
        try:
            with Float64Casts():
                found = check_isolation(model, batch)
        except ValueError as error:
            if "packed sequences" not in str(error):
                raise
            verdicts.append(skipped(name, "", f"refused by transformers: {error}"))
            continue
        text = "; ".join([found.summary(), *found.notes])
        verdicts.append(judged(name, text) if found else judged(name, "", text))
    apart = [one.name for one in verdicts if one.outcome == "pass"]
    mixed = [one.name for one in verdicts if one.outcome == "fail"]
    of = f"{type(model).__name__} with {attention} in transformers {transformers_version}"
    works = f"right: {', '.join(apart) or 'none'}"
    return (f"Leaks: {of} packed by {', '.join(mixed)}; {works}" if mixed else f"No leak: {of}; {works}"), verdicts
