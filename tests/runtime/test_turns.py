"""Two halves by turns: one order of everything, transfers beside the other half, errors of either."""

import threading
import time
from functools import partial

import pytest
import torch

from evenload.runtime.comm.beside_times import BesideTimes
from evenload.runtime.comm.transfer_queue import StreamTransfers, ThreadTransfers
from evenload.runtime.comm.turns import Turns
from fake_streams import Device

CPU = torch.device("cpu")


def turns(put_away=lambda: lambda: None) -> Turns:
    return Turns(ThreadTransfers(), put_away)


def by_turns(found: Turns, told: list[str], blocks: int = 2):
    """A half that tells what it does: gather, first part, second part and sums of every block."""

    def half(name: str):
        def run() -> str:
            for block in range(blocks):
                told.append(f"{name} X{block}")
                found.transfer(partial(told.append, f"{name} gathered {block}"))
                told.append(f"{name} Y{block}")
                found.next()
                told.append(f"{name} Z{block}")
                found.transfer(partial(told.append, f"{name} summed {block}"))
            return name

        return run

    return half("a"), half("b")


def test_the_leader_is_one_turn_ahead_in_everything():
    told: list[str] = []
    found = turns()
    assert found.run(*by_turns(found, told)) == ("a", "b")
    computed = [word for word in told if "ed" not in word]
    assert computed == [
        "a X0", "a Y0", "b X0", "a Z0", "b Y0", "a X1", "b Z0", "a Y1", "b X1", "a Z1", "b Y1", "b Z1",
    ]  # fmt: skip
    moved = [word for word in told if "ed" in word]
    assert moved == [
        "a gathered 0", "b gathered 0", "a summed 0", "a gathered 1", "b summed 0", "b gathered 1", "a summed 1",
        "b summed 1",
    ]  # fmt: skip


def test_a_transfer_runs_beside_the_other_half():
    """Each waits for something that only the other's turn does."""
    found, met = turns(), [threading.Event(), threading.Event()]

    def half(own: int):
        def run() -> None:
            if own == 0:
                found.next()
            met[own].set()
            found.transfer(lambda: met[1 - own].wait(10) or pytest.fail("the other half did not run"))
            found.next()

        return run

    found.run(half(0), half(1))


def test_what_is_not_needed_soon_goes_behind_what_is():
    found, told = turns(), []

    def leader() -> None:
        wait = found.transfer_later(lambda: told.append("later"))
        found.transfer(lambda: told.append("now"))
        wait()
        wait()
        found.transfer_later(lambda: told.append("nobody waits"))

    found.run(leader, lambda: None)
    assert told == ["now", "later", "nobody waits"]


def test_each_half_finds_what_it_has_set():
    state = {"of": "nobody"}

    def put_away():
        mine = state["of"]
        return lambda: state.update(of=mine)

    found, seen = turns(put_away), []

    def half(name: str):
        def run() -> None:
            state["of"] = name
            for _ in range(4):
                found.next()
                seen.append(state["of"] == name)

        return run

    found.run(half("a"), half("b"))
    assert seen == [True] * 8


def test_the_follower_computes_as_the_leader_does():
    found, modes = turns(), []
    for has_grad in (False, True):
        with torch.set_grad_enabled(has_grad):
            turns().run(lambda: None, lambda: modes.append(torch.is_grad_enabled()))
    assert modes == [False, True]
    found.run(lambda: None, lambda: None)


@pytest.mark.parametrize("who", ["leader", "follower", "transfer of the leader", "transfer of the follower"])
def test_an_error_of_either_half_ends_both(who):
    found, went_on = turns(), []

    def fail() -> None:
        raise OSError(who)

    def half(name: str):
        def run() -> None:
            found.next()
            found.next()
            if who == name:
                fail()
            found.transfer(fail if who == f"transfer of the {name}" else lambda: None)
            for _ in range(3):
                found.next()
            went_on.append(name)

        return run

    with pytest.raises(OSError, match=who):
        found.run(half("leader"), half("follower"))
    assert len(went_on) < 2
    told: list[str] = []
    again = turns()
    again.run(*by_turns(again, told))
    assert len(told) == 20, "the next pack finds both threads ready"


@pytest.mark.parametrize("at_once", [True, False], ids=["transfers at once", "transfers late"])
def test_a_gpus_transfers_read_what_was_computed_before_and_are_there_when_waited_for(at_once, monkeypatch):
    device = Device(copies_at_once=at_once).replace(monkeypatch)
    transfers = StreamTransfers(torch.device("cuda"))
    given, gathered, seen = torch.zeros(2), torch.zeros(2), []
    device.compute.queue(lambda: given.fill_(1))
    pending = transfers.start(lambda: device.current_stream(None).queue(lambda: gathered.copy_(2 * given)))
    device.compute.queue(lambda: seen.append("the other half"))
    pending.wait()
    pending.wait()
    device.compute.queue(lambda: seen.append(gathered.tolist()))
    device.end()
    assert seen == ["the other half", [2, 2]]


def test_seconds_that_nothing_hides_are_those_waited_for():
    times, others = BesideTimes(CPU), BesideTimes(CPU)
    times.start(lambda: time.sleep(0.02)).wait()
    hidden = times.start(lambda: time.sleep(0.02))
    others.start(lambda: time.sleep(0.02)).wait()
    hidden.wait()
    found = times.read()
    assert found.transfer_s >= 0.04
    assert 0 < found.hidden_s < found.transfer_s
    assert found.waited_s == pytest.approx(found.transfer_s - found.hidden_s)
    assert others.read().transfer_s >= 0.02, "each knows its own transfers"
    times.begin_step()
    assert times.read() == (0, 0)
