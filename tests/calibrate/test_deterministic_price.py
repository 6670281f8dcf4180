"""The price of `train.deterministic`: both ways are timed, and what the run needs is left switched on."""

from types import SimpleNamespace

import pytest
import torch

from cost_samples import sample_model
from evenload.attention.reference import ReferenceAttention
from evenload.calibrate.kernels import deterministic_price
from evenload.runtime.device import use_deterministic_kernels


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
    price = deterministic_price(stage, sample_model(num_heads=4, head_dim=32), 1, rows=256)
    assert seen == [False, True] * (len(seen) // 2)
    assert price > 2
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.utils.deterministic.fill_uninitialized_memory
