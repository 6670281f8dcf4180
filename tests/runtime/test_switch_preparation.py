"""What a run measures of switches at its start, and the memory that pieces take."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from evenload.planning.layouts.moves import Piece
from evenload.runtime.optim.data_parallel import BufferGroup
from evenload.runtime.stages import live_stages
from evenload.runtime.stages.live_pieces import LivePiece
from evenload.runtime.stages.live_stages import Reading

PIECES = [
    SimpleNamespace(
        piece=Piece(unit=unit, num_elements=10, weight_bytes=4), is_held=True, shared=object() if unit == 0 else None
    )
    for unit in range(2)
]


@pytest.mark.parametrize(("rank", "source"), [(0, 1), (1, 0), (2, None), (3, None)])
def test_ranks_of_a_machine_on_which_nothing_is_shared_read_nothing(rank, source, monkeypatch):
    """The budget held the first piece, which two machines of two ranks each have on the first one alone."""
    read = []
    monkeypatch.setattr(live_stages, "gather_from_all", lambda mine, mesh, what: [[0], [0], [], []])
    monkeypatch.setattr(live_stages, "_LEAST_BYTES", 100)
    mesh = SimpleNamespace(rank=rank, num_ranks=4)
    twins = SimpleNamespace(
        reaches=lambda piece, other: piece == 0 and other // 2 == rank // 2,
        read=lambda piece, part, source, start, into, num_updates: read.append((piece, source)),
    )
    one = Reading(PIECES, twins, mesh)
    one.run()
    assert one.num_bytes == (0 if source is None else 120)
    assert read == ([] if source is None else [(0, source)] * 3)


def test_a_stand_in_comes_and_goes_as_its_piece_does_and_leaves_it_alone():
    """Seven elements in two parameters, with room for those of two ranks."""
    parameters = [nn.Parameter(torch.arange(6.0).view(2, 3)), nn.Parameter(torch.ones(1))]
    group = BufferGroup(("a", "b"), tuple(parameters), decays=True, is_part=False, unit=1)
    live = LivePiece(
        1, parameters, group, None, at_both_ends=False, data_sizes=[1, 2], device=torch.device("cpu"),
        is_held=True,
    )  # fmt: skip
    like = live.stand_in()
    assert like.piece == live.piece
    for _ in range(2):
        assert not like.is_held
        assert [len(parameter) for parameter in like.parameters] == [0, 0]
        like.gain()
        assert [parameter.shape for parameter in like.parameters] == [(2, 3), (1,)]
        assert len(like.weights) == 7
        like.parameters[0].data.fill_(9.0)
        like.drop()
    assert live.is_held
    assert parameters[0].tolist() == [[0, 1, 2], [3, 4, 5]]
