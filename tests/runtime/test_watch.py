"""Waits that fail name themselves; other errors stay what they are."""

import threading

import pytest
import torch.distributed as dist

from evenload.errors import RankLostError
from evenload.runtime.comm import watch as watch_module
from evenload.runtime.comm.watch import RankWatch
from evenload.types.plan import parse_action

BROKEN = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer"
LATE = "[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1000ms for recv operation to complete"


def test_a_broken_transfer_is_told_with_its_step() -> None:
    watch = RankWatch(3, "rank 3 (dp 1, stage 1)", 4)
    watch.step = 12
    with pytest.raises(RankLostError) as caught, watch.waiting("the gradient of backward pack 7", "rank 1"):
        raise RuntimeError(BROKEN)
    reported = "waited for the gradient of backward pack 7 of step 12 from rank 1: the connection broke. "
    assert str(caught.value).startswith(f"rank 3 (dp 1, stage 1) {reported}")


class CutOffStore(dist.HashStore):
    """Answers no more once its cable is cut."""

    is_cut = False

    def set(self, key: str, value: str) -> None:
        if self.is_cut:
            threading.Event().wait()
        super().set(key, value)


def test_a_store_that_does_not_answer_ends_the_diagnosis(monkeypatch) -> None:
    monkeypatch.setattr(watch_module, "_PATIENCE", 0.1)
    monkeypatch.setattr(watch_module, "_ANSWER_S", 0.1)
    store = CutOffStore()
    watch = RankWatch(1, "rank 1", 2, store)
    store.is_cut = True
    with pytest.raises(RankLostError) as caught, watch.waiting("the barrier"):
        raise RuntimeError(LATE)
    assert "The store through which ranks met does not answer either" in str(caught.value)
    watch.close()


def test_the_silent_rank_is_told_from_one_that_lives() -> None:
    store = dist.HashStore()
    watches = [RankWatch(rank, f"rank {rank}", 3, store) for rank in range(3)]
    for watch in watches:
        watch.step = 5
        watch.record(parse_action("1F7"))
    watches[2].close()  # shows no more signs, as a dead one
    try:
        with pytest.raises(RankLostError) as caught, watches[0].waiting("the barrier"):
            raise RuntimeError(LATE)
    finally:
        watches[0].close()
        watches[1].close()
    assert "No sign of life from rank 2 (last seen at " in str(caught.value)
    assert "rank 1" not in str(caught.value)
