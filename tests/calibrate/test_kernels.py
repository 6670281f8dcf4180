"""Bytes that layers keep, counted and predicted."""

import pytest
import torch

from evenload.calibrate.kernels import activation_bytes
from evenload.cost.layer_counts import POLICIES, activation_bytes_per_token
from evenload.data.hub import model_from_config
from reference_training import tiny_config
from single_stage import stage_of

KINDS = ("llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3", "olmo2", "mixtral", "qwen3_moe")


@pytest.mark.parametrize("kind", KINDS)
def test_counted_bytes_are_the_cost_models(kind):
    config = tiny_config(kind)
    model = model_from_config(config.to_dict(), kind, 4)
    counted = activation_bytes(stage_of(config, torch.float32)[0], model, 1)
    for policy in POLICIES:
        assert set(activation_bytes_per_token(model, policy).tolist()) == {counted[policy]}
    assert counted["replay"] > counted["recompute"] > counted["offload"] == 0
