"""The price of `train.deterministic`: both ways are timed, and what the run needs is left switched on."""

from types import SimpleNamespace

import pytest
import torch

from cost_samples import sample_model
from evenload.attention.reference import ReferenceAttention
from evenload.calibrate.kernels import activation_bytes, deterministic_slowdown
from evenload.cost.layer_counts import POLICIES, activation_bytes_per_token
from evenload.runtime.device import use_deterministic_kernels
from evenload.types.model import model_from_hf_config
from reference_training import tiny_config
from single_stage import stage_of


@pytest.fixture
def kernels_as_before():
    yield
    use_deterministic_kernels(False)
    torch.utils.deterministic.fill_uninitialized_memory = True


def test_both_ways_are_timed_by_turns_and_one_order_stays(kernels_as_before):
    seen = []

    class Slower(ReferenceAttention):
        """Works twice as much where one order is wanted."""

        def backward(self, *given):
            seen.append(torch.are_deterministic_algorithms_enabled())
            for _ in range(6 if seen[-1] else 1):
                parts = list(super().backward(*given))
            return iter(parts)

    stage = SimpleNamespace(backend=Slower(), device=torch.device("cpu"), dtype=torch.float32)
    price = deterministic_slowdown(stage, sample_model(num_heads=4, head_dim=32), 1, rows=256)
    assert seen == [False, True] * (len(seen) // 2)
    assert price > 2
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.utils.deterministic.fill_uninitialized_memory


KINDS = ("llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3", "olmo2", "mixtral", "qwen3_moe")


@pytest.mark.parametrize("kind", KINDS)
def test_counted_bytes_are_the_cost_models(kind):
    config = tiny_config(kind)
    model = model_from_hf_config(config.to_dict(), kind, 4)
    counted = activation_bytes(stage_of(config, torch.float32)[0], model, 1)
    assert counted == {policy: activation_bytes_per_token(model, policy) for policy in POLICIES}
    assert counted["replay"] > counted["recompute"] > counted["offload"] == 0
