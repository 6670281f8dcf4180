"""Choosing a rank's device and its clock."""

import pytest
import torch

from evenload.errors import ConfigError
from evenload.runtime.device import HostClock, require_device, step_clock, to_device

CPU = torch.device("cpu")


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


def test_marks_of_the_host_clock_are_its_times():
    times = iter([1.0, 2.5])
    clock = HostClock(lambda: next(times))
    clock.start()
    marks = [clock.mark(), clock.mark()]
    assert clock.seconds(marks) == [1.0, 2.5]
    assert isinstance(step_clock(CPU), HostClock)


def test_copies_to_a_cpu_are_the_tensor_itself():
    tensor = torch.arange(3)
    assert to_device(tensor, CPU) is tensor
