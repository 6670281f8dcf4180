"""Choosing a rank's device, and the memory of its process as the system counts it."""

import numpy as np
import pytest
import torch

from evenload.errors import ConfigError
from evenload.runtime.device import require_device, resident_bytes, use_deterministic_kernels

MEBIBYTE = 2**20


@pytest.fixture
def kernels_as_before():
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True


def test_deterministic_kernels_add_in_one_order_and_fill_nothing(kernels_as_before):
    use_deterministic_kernels()
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.utils.deterministic.fill_uninitialized_memory


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there_is_refused_with_what_to_do():
    with pytest.raises(ConfigError, match=r"torch finds no GPU here .* use train\.device = 'cpu'"):
        require_device("cuda", 1)


def test_more_processes_than_gpus_are_refused(monkeypatch):
    """Two ranks on one GPU deadlock in NCCL."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    require_device("cuda", 2)
    with pytest.raises(ConfigError, match=r"4 processes start on this machine, which shows 2 GPUs"):
        require_device("cuda", 4)


@pytest.mark.skipif(resident_bytes() is None, reason="this system has no /proc/self/status")
def test_memory_that_is_written_is_counted():
    before = resident_bytes()
    block = np.ones(200 * MEBIBYTE, np.uint8)
    assert resident_bytes() - before > 180 * MEBIBYTE
    del block
