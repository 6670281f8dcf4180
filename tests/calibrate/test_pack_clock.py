"""A pack's host and device seconds apart, on a host and a device whose times the test makes up."""

from types import SimpleNamespace

import pytest
import torch

from evenload.calibrate import rounds as pack_clock
from evenload.calibrate.rounds import AskingClock, PackClock, QueueClock


class Machine:
    """A host that queues kernels on one stream; both only move forward in time.

    Args:
        monkeypatch: whose `torch.cuda` and clock are replaced.
    """

    def __init__(self, monkeypatch):
        self.now_s = self.device_s = 0.0
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event(self))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
        monkeypatch.setattr(pack_clock, "seconds_now", lambda device: self.synchronise())
        monkeypatch.setattr(pack_clock, "time", SimpleNamespace(perf_counter=lambda: self.now_s))

    def launch(self, *, host_s, device_s):
        self.now_s += host_s
        self.device_s = max(self.device_s, self.now_s) + device_s

    def synchronise(self):
        self.now_s = max(self.now_s, self.device_s)
        return self.now_s

    def kernels(self, host_s, device_s, count=10):
        return lambda: [self.launch(host_s=host_s, device_s=device_s) for _ in range(count)]


class Event:
    def __init__(self, machine):
        self.machine = machine

    def record(self, stream):
        self.at_s = max(self.machine.device_s, self.machine.now_s)

    def query(self):
        return self.at_s <= self.machine.now_s

    def elapsed_time(self, end):
        return (end.at_s - self.at_s) * 1e3


@pytest.fixture
def machine(monkeypatch):
    return Machine(monkeypatch)


def keeps_busy(machine):
    return lambda seconds: machine.launch(host_s=1e-6, device_s=seconds)


@pytest.mark.parametrize(("host_s", "device_s"), [(50e-6, 10e-6), (10e-6, 50e-6), (20e-6, 20e-6)])
def test_both_are_told_apart_once_the_host_has_a_head_start(machine, host_s, device_s):
    clock = QueueClock(torch.device("cuda"), keeps_busy(machine))
    first = clock.time("pack", machine.kernels(host_s, device_s))
    # Waits for the host are in the device's seconds where it was not kept busy: the pack takes neither more nor less.
    assert first.host_s == pytest.approx(10 * host_s)
    assert max(first) == pytest.approx(10 * max(host_s, device_s), rel=0.15)
    for _ in range(2):
        again = clock.time("pack", machine.kernels(host_s, device_s))
        assert again == (pytest.approx(10 * device_s), pytest.approx(10 * host_s))


def test_a_first_call_that_compiles_asks_for_no_long_head_start_later(machine):
    clock = QueueClock(torch.device("cuda"), keeps_busy(machine))
    clock.time("pack", machine.kernels(1.0, 10e-6))
    clock.time("pack", machine.kernels(50e-6, 10e-6))
    before_s = machine.synchronise()
    found = clock.time("pack", machine.kernels(50e-6, 10e-6))
    assert found.device_s == pytest.approx(100e-6)
    assert machine.synchronise() - before_s < 2e-3


def test_a_host_that_becomes_slower_gets_a_longer_head_start(machine):
    clock = QueueClock(torch.device("cuda"), keeps_busy(machine))
    for host_s in (20e-6, 20e-6, 90e-6):
        found = clock.time("pack", machine.kernels(host_s, 10e-6))
    assert found.device_s > 500e-6, "it waited for its host"
    assert clock.time("pack", machine.kernels(90e-6, 10e-6)).device_s == pytest.approx(100e-6)


def test_devices_that_share_a_pack_begin_it_together(machine):
    """What this rank waits for the others is before the pack, not in it."""
    other_s = 5e-3
    clock = QueueClock(torch.device("cuda"), keeps_busy(machine), lambda: machine.launch(host_s=1e-6, device_s=other_s))
    for _ in range(2):
        found = clock.time("pack", machine.kernels(50e-6, 10e-6))
    assert found.device_s == pytest.approx(100e-6)


def test_layers_whose_host_asks_the_device_are_not_told_apart(machine):
    def asks():
        machine.kernels(50e-6, 10e-6)()
        machine.synchronise()
        machine.kernels(50e-6, 10e-6)()

    clock = AskingClock(torch.device("cuda"), keeps_busy(machine))
    for _ in range(3):
        found = clock.time("pack", asks)
        assert found == (pytest.approx(20 * 50e-6 + 20e-6, rel=0.02), 0.0)


def test_a_cpu_is_its_own_host():
    found = PackClock(torch.device("cpu")).time("pack", lambda: torch.ones(200, 200) @ torch.ones(200, 200))
    assert found.device_s > 0
    assert found.host_s == 0
