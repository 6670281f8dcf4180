"""Units of a model: as many buffers as the cost model counts, and no memory on ranks that do not hold them."""

from collections import Counter
from functools import partial

import pytest
import torch

from adapter_cases import LORA
from evenload.config.sections import with_adapters
from evenload.cost.units import unit_buffers
from evenload.data.hub import model_from_config
from evenload.runtime.device import resident_bytes
from evenload.runtime.model.hf_model import build_rank_models, build_stage_model
from evenload.runtime.optim.data_parallel import flatten_units
from evenload.runtime.stages.live_stages import unit_modules
from evenload.types.layout import even_layout
from matrix import MODELS
from reference_training import tiny_config
from transformers_version import is_older

UNCUT = ("olmo2", "gpt2, tied")
SIZES = ({}, {"pp": 2}, {"pp": 2, "virtual": 2}, {"tp": 2})
BUILT = {"dtype": torch.float32, "device": torch.device("cpu"), "weights": None, "seed": 1}


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_a_unit_has_as_many_buffers_as_the_cost_model_says(name, sizes):
    case = MODELS[name]
    if "tp" in sizes and (name in UNCUT or (name == "bamba" and is_older)):  # whose norm was of all heads
        pytest.skip("is not cut")
    config, lora = tiny_config(case.kind, **case.changes), LORA if case.lora else None
    layout = even_layout(config.num_hidden_layers, **sizes)
    spec = with_adapters(model_from_config(config.to_dict(), name, 8), lora)
    build = partial(build_stage_model, config, **BUILT, lora=lora)
    for rank in range(layout.pipeline_ranks):
        models = build_rank_models(layout, rank, build)
        result = Counter(buffer.unit for buffer in flatten_units(tuple(models.values()), dp=2))
        assert result == unit_buffers(spec, layout, rank), (name, rank)


@pytest.mark.skipif(resident_bytes() is None, reason="this system has no /proc/self/status")
@pytest.mark.parametrize("tp", [1, 2])
def test_units_elsewhere_take_no_memory(tp):
    """A head of 77 MB on a rank of the first stage, whole or one of two parts."""
    config = tiny_config("llama", vocab_size=400_000)
    first = build_stage_model(config, layers=(0, 2), **BUILT, tp=tp)
    before = resident_bytes()
    whole, _ = unit_modules((first,), dtype=torch.float32, device=torch.device("cpu"), lora=None, tp_rank=0, tp=tp)
    assert whole.head.weight.nbytes == 400_000 * 48 * 4 // tp
    assert resident_bytes() - before < 15_000_000
