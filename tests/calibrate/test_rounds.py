"""Packs that a GPU is timed with at the start of a run, and what is timed within a limit."""

from types import SimpleNamespace

import pytest
import torch

from cost_samples import mixed_model, sample_model
from evenload.calibrate import calibrate
from evenload.calibrate import rounds as pack_clock
from evenload.calibrate.calibrate import _rounds
from evenload.calibrate.kernels import QUICK_HEAD_ROWS
from evenload.calibrate.rounds import (
    NEEDED_ROUNDS,
    QUICK_ROUNDS,
    PackClock,
    QueueClock,
    Sample,
    longest_of,
    rounds_up_to,
    shares_of,
)
from evenload.data.hub import model_from


def tokens_of(packs):
    return [sum(stop - start for _, start, stop in pack) for pack in packs]


@pytest.mark.parametrize(("pack", "document"), [(32_768, 32_768), (65_536, 4096), (20_000, 300), (9000, 100_000)])
def test_they_go_up_to_the_largest_pack_of_the_run_and_never_beyond(pack, document):
    rounds = rounds_up_to(pack, document)
    largest = [max(tokens_of(packs)) for packs in rounds]
    assert pack / 2 * 0.98 < max(largest) <= pack
    assert all(longest_of(packs) <= document for packs in rounds)
    assert len(set(rounds)) == len(rounds)


def test_documents_as_long_as_packs_come_whole_and_cut():
    whole, cut = ([8192], [7168, 1024])
    assert [tokens_of(packs) for packs in rounds_up_to(8192, 8192)] == [[8192], whole, cut]
    assert longest_of(rounds_up_to(8192, 8192)[0]) == 1024


class FakeStage:
    """Layers by number on a device of a type."""

    def __init__(self, device, layers):
        self.device, self.model = SimpleNamespace(type=device), SimpleNamespace(layers=dict.fromkeys(layers))

    def with_layers(self, layers):
        return FakeStage(self.device.type, layers)


def timed(monkeypatch, device, gigabytes, model, most_tokens):
    """(largest pack, layers that it is timed on) of every round."""
    memory = SimpleNamespace(total_memory=gigabytes << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: memory)
    stage, mesh = FakeStage(device, range(model.num_layers)), SimpleNamespace(layout=SimpleNamespace(tp=1))
    rounds = _rounds(stage, model, mesh, most_tokens, most_tokens)
    assert [one.packs for one in rounds[: len(QUICK_ROUNDS)]] == list(QUICK_ROUNDS)
    for one in rounds:
        assert [layer.reach for layer in one.layers] == [model.windows[index] for index in one.stage.model.layers]
    return [(max(tokens_of(one.packs)), list(one.stage.model.layers)) for one in rounds]


@pytest.mark.parametrize(
    ("device", "gigabytes", "largest"), [("cpu", 0, 4096), ("cuda", 80, 32_768), ("cuda", 3, 8192)]
)
def test_a_gpu_is_timed_with_the_packs_of_its_run_that_fit_it(monkeypatch, device, gigabytes, largest):
    sizes = {"hidden_size": 1024, "num_heads": 16, "num_kv_heads": 16, "head_dim": 64, "ffn_hidden_size": 2048}
    model = sample_model(num_layers=1, **sizes)
    assert max(timed(monkeypatch, device, gigabytes, model, 32_768))[0] == largest


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_models_whose_documents_stay_whole_are_timed_without_cuts(monkeypatch, device):
    memory = SimpleNamespace(total_memory=80 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: memory)
    stage, mesh = FakeStage(device, range(3)), SimpleNamespace(layout=SimpleNamespace(tp=1))
    cut, whole = (_rounds(stage, mixed_model(mixer=name), mesh, 32_768, 32_768) for name in ("", "Mixer"))
    assert any(start for one in cut for pack in one.packs for _, start, _ in pack)
    assert whole
    assert not any(start for one in whole for pack in one.packs for _, start, _ in pack)


def test_large_packs_of_a_large_model_are_timed_on_one_layer(monkeypatch):
    """7B on one GPU: 32 layers would keep 100 GB of a pack of 32,768 tokens."""
    model = model_from("llama-7b")
    rounds = timed(monkeypatch, "cuda", 80, model, 65_536)
    assert max(rounds)[0] == 65_536
    assert all(layers == ([0] if tokens > 4096 else [0, 1, 2, 3]) for tokens, layers in rounds)
    assert all(layers == list(range(32)) for _, layers in timed(monkeypatch, "cpu", 0, model, 65_536))


class Machine:
    """A host that queues kernels on one stream; both only move forward in time."""

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


def test_layers_whose_host_asks_the_device_are_not_told_apart(machine):
    def asks():
        machine.kernels(50e-6, 10e-6)()
        machine.synchronise()
        machine.kernels(50e-6, 10e-6)()

    clock = QueueClock(torch.device("cuda"), keeps_busy(machine), host_reads=True)
    for _ in range(3):
        result = clock.time("pack", asks)
        assert result == (pytest.approx(20 * 50e-6 + 20e-6, rel=0.02), 0.0)


class SlowMachine:
    """Takes so many seconds for a token on a layer, and twice of them backward; nothing else takes time."""

    def __init__(self, monkeypatch, token_s):
        self.now_s, self.token_s = 0.0, token_s
        monkeypatch.setattr(calibrate, "time", SimpleNamespace(perf_counter=lambda: self.now_s))
        monkeypatch.setattr(calibrate, "time_round", self.time_round)
        monkeypatch.setattr(calibrate, "most_of_ranks", lambda value, mesh: value)

    def time_round(self, stage, packs, clock):
        for direction, factor, order in (("forward", 1, packs), ("backward", 2, packs[::-1])):
            for pack in order:
                seconds = factor * self.token_s * len(stage.model.layers) * tokens_of([pack])[0]
                self.now_s += seconds
                yield Sample(direction, pack, seconds)


@pytest.mark.parametrize(
    ("token_s", "num_layers", "most_s"),
    [(1e-6, 12, 9.0), (5e-5, 4, 15.0), (2e-4, 1, 14.0), (1e-3, 1, 20.0), (3e-3, 1, 46.0)],
    ids=["fast", "a few layers", "one layer", "one layer, once", "longer than the limit"],
)
def test_slow_layers_are_timed_fewer_and_less_often_so_that_it_ends(monkeypatch, token_s, num_layers, most_s):
    """Within 20 s as long as the least that is needed takes less; and all that is needed is timed."""
    machine, mesh = SlowMachine(monkeypatch, token_s), SimpleNamespace(device="cpu", tensor=None)
    model = sample_model(num_layers=12)
    stage, is_few = calibrate._timed_part(FakeStage("cpu", range(12)), model, mesh, calibrate._PASS_SHARE * 20)
    assert (len(stage.model.layers), is_few) == (num_layers, num_layers == 1)
    shares = shares_of(stage, model, model)
    wanted = [calibrate.TimedRound(packs, stage, shares) for packs in QUICK_ROUNDS]
    end_s = calibrate._LAYERS_SHARE * 20
    samples, spread = calibrate._time_layers(wanted, PackClock(torch.device("cpu")), mesh, end_s, is_few=is_few)
    assert machine.now_s <= most_s
    assert spread == pytest.approx(0.0), "every repeat takes the same"
    done = {(one.direction, one.ranges) for one in samples}
    assert {(way, pack) for way in ("forward", "backward") for packs in NEEDED_ROUNDS for pack in packs} <= done
    for one in samples:
        factor = 1 if one.direction == "forward" else 2
        assert one.seconds == pytest.approx(factor * token_s * tokens_of([one.ranges])[0])


@pytest.mark.parametrize(("call_s", "expected"), [(0.01, 4), (0.9, 2), (5.0, 2)])
def test_heads_are_left_out_where_they_are_slow_but_for_two(monkeypatch, call_s, expected):
    now = [0.0]

    def median_seconds(work, device, repeats):
        now[0] += call_s * repeats
        return call_s

    monkeypatch.setattr(calibrate, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(calibrate, "median_seconds", median_seconds)
    monkeypatch.setattr(calibrate, "head_work", lambda last, vocab_size: dict.fromkeys(QUICK_HEAD_ROWS))
    mesh = SimpleNamespace(device="cpu", tensor=None)
    result = calibrate._time_heads(SimpleNamespace(device=None), sample_model(), mesh)
    assert result == tuple((rows, call_s) for rows in QUICK_HEAD_ROWS[:expected])
