"""Modules of all units on a rank that holds some of them: the others cost no memory."""

import pytest
import torch

from evenload.runtime.device import resident_bytes
from evenload.runtime.model.hf_model import build_stage_model
from evenload.runtime.stages.rank_stages import unit_modules
from reference_training import tiny_config


@pytest.mark.skipif(resident_bytes() is None, reason="this system has no /proc/self/status")
@pytest.mark.parametrize("tp", [1, 2])
def test_units_elsewhere_take_no_memory(tp):
    """A head of 77 MB on a rank of the first stage, whole or one of two parts."""
    config = tiny_config("llama", vocab_size=400_000)
    first = build_stage_model(
        config,
        layers=(0, 2),
        dtype=torch.float32,
        device=torch.device("cpu"),
        weights=None,
        seed=0,
        tp=tp,
    )
    before = resident_bytes()
    whole, _ = unit_modules((first,), dtype=torch.float32, lora=None, tp_rank=0, tp=tp)
    assert whole.head.weight.nbytes == 400_000 * 48 * 4 // tp
    assert resident_bytes() - before < 15_000_000
