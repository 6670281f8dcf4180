"""Calibration runs every kind of model that is trained."""

import pytest
import torch

from evenload.attention.backends import select_backend
from evenload.calibrate.rounds import PackClock, num_tokens_of, time_round
from evenload.config.sections import LoraConfig
from evenload.runtime.model.hf_model import build_stage_model
from evenload.runtime.model.supported import attention_soft_cap
from evenload.runtime.optim.parameter_units import flatten_units
from evenload.runtime.replay.stage import PipelineStage
from evenload.types.token_range import Range
from reference_training import tiny_config


@pytest.mark.parametrize(
    ("kind", "lora", "balance"),
    [("gemma3", None, 0.0), ("mixtral", None, 0.1), ("gemma2", LoraConfig(rank=2), 0.0)],
)
def test_packs_of_every_kind_of_model_are_timed(kind, lora, balance):
    """Balance needs a step's documents, adapters have no gradient of the base, capped scores have another backend."""
    config = tiny_config(kind)
    model = build_stage_model(
        config,
        layers=(0, 4),
        dtype=torch.float32,
        device=torch.device("cpu"),
        weights=None,
        seed=0,
        lora=lora,
        router_aux_loss_coef=balance,
    )
    flatten_units(model, dp=1)
    stage = PipelineStage(model, select_backend("auto", "cpu", attention_soft_cap(config)))
    packs = tuple(tuple(Range(doc, *cut) for doc in range(2)) for cut in ((0, 20), (20, 32)))
    assert num_tokens_of(packs) == {0: 32, 1: 32}
    timed = list(time_round(stage, packs, PackClock(stage.device)))
    assert [(sample.direction, sample.ranges) for sample in timed] == [
        ("forward", packs[0]),
        ("forward", packs[1]),
        ("backward", packs[1]),
        ("backward", packs[0]),
    ]
    assert all(sample.seconds > 0 for sample in timed)
