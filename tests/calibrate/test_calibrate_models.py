"""Calibration runs every kind of model that is trained."""

import pytest
import torch

from evenload.attention.backends import select_backend
from evenload.calibrate.calibrate import _time_round
from evenload.runtime.config.lora_config import LoraConfig
from evenload.runtime.model.hf_model import build_stage_model
from evenload.runtime.model.supported import attention_soft_cap
from evenload.runtime.optim.parameter_units import flatten_units
from evenload.runtime.replay.stage import PipelineStage
from evenload.types.hf_config import model_from_hf_config
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
    spec = model_from_hf_config(config.to_dict(), kind, 4)
    timed = list(_time_round(stage, spec, ((0, 20, 32), (0, 20, 32))))
    assert [(sample.direction, sample.features[0]) for sample in timed] == [
        ("forward", 40.0),
        ("forward", 24.0),
        ("backward", 24.0),
        ("backward", 40.0),
    ]
    assert all(sample.seconds > 0 for sample in timed)
