"""Optimizer state on its way on a GPU: behind what made it, beside the step, before the update that reads it."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from evenload.plan.layouts.moves import Piece
from evenload.runtime.stages.twin_layer import StateArrival, TwinLayer
from evenload.types.layout import even_layout
from fake_streams import Device


@pytest.fixture(params=[True, False], ids=["moves at once", "moves late"])
def device(request, monkeypatch):
    return Device(copies_at_once=request.param).replace(monkeypatch)


def mesh(dp: int) -> SimpleNamespace:
    watch = SimpleNamespace(waiting=lambda what: nullcontext())
    gpu = SimpleNamespace(type="cuda")
    return SimpleNamespace(
        layout=even_layout(2, dp=dp), rank=0, pp_rank=0, data_rank=0, data_size=dp, device=gpu, watch=watch, moving=None
    )


def test_state_waits_for_the_update_before_and_not_for_the_step_behind_which_it_moves(device, monkeypatch):
    old, seen = torch.full((4,), torch.nan), []

    def keep(arrival, after) -> None:
        kept = after[0]["exp_avg"]
        device.current_stream(arrival._new.device).queue(lambda: kept.copy_(old[: len(kept)]))

    monkeypatch.setattr(StateArrival, "_keep_all", keep)
    live = SimpleNamespace(
        piece=Piece(unit=0, num_elements=4, weight_bytes=4, state_bytes=4),
        is_held=True,
        is_trained=True,
        shared=None,
        state_names=("exp_avg",),
        buffer=SimpleNamespace(grads=torch.zeros(4)),
        share_in=lambda mesh: (0, 4 // mesh.data_size),
    )
    device.compute.queue(lambda: old.copy_(torch.arange(4.0)))
    arrival = StateArrival(TwinLayer([live], None), (), mesh(1), mesh(2), {0: {"exp_avg": old}}, 0)
    arrival.thread.join()
    ordered_behind = len(device.compute.entries)
    device.compute.queue(lambda: seen.append("step"))
    device.copying.run()
    # All of the second stream ran; of the first, no more than what was there before.
    assert device.compute.num_done == ordered_behind == 1
    after, _ = arrival.wait()
    device.compute.queue(lambda: seen.append(after[0]["exp_avg"].clone()))
    device.end()
    assert seen[0] == "step"
    assert seen[1].tolist() == [0.0, 1.0]
    assert [(tensor is after[0]["exp_avg"], stream) for tensor, stream, _ in device.recorded] == [
        (True, device.compute)
    ]
