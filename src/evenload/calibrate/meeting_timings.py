"""What a layer takes longer because ranks that share a pack meet in it: such packs, timed as they run.

Other packs are timed on every rank by itself. Ranks that share a pack gather keys and values in every layer and sum
their gradients in its backward. Then one of them is late, on a CPU also because the threads that move bytes want its
core, and who waited has to be woken, which beside compute takes several times what a transfer by itself does. It adds
up to the same in every layer, whatever it holds; how much it is belongs to the machine and to its hour.

So packs of documents that all ranks of the largest group share go forward and backward with everybody at once, in one
part, between the packs that the other coefficients come from, because a machine changes its speed within seconds. What
they take beyond the price of their rows, transfers and copies is the meetings' (`assemble`).

Price: half of the time in which packs are timed.
"""

import functools
import statistics
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from evenload.calibrate.pack_clock import PackClock
from evenload.runtime.comm.cp_groups import ContextGroup
from evenload.runtime.comm.mesh import Mesh
from evenload.runtime.replay.context_attention import GatherAttention
from evenload.runtime.replay.pack_tokens import PackTokens
from evenload.runtime.replay.stage import PipelineStage
from evenload.runtime.replay.store import ActivationStore
from evenload.stepplan.rank_rows import shared_documents
from evenload.types.micropack import Direction
from evenload.types.token_range import Range

_SHARED_PACKS: tuple[tuple[int, ...], ...] = ((512,), (256,), (128, 128), (192, 48, 16), (24,), (8,))
"""Tokens a rank of the documents of every pack. Of the small ones nearly all is meetings; in the others a price of
transfers that is off by a part would pass for some."""


class SharedSample(NamedTuple):
    """One rank's part of a timed pack, on one layer.

    Args:
        ranges: this rank's rows; tokens: of the whole pack, whose keys and values travel; ranks: that share it.
        windows: of the layers that were timed, 0 = full.
    """

    direction: Direction
    ranges: tuple[Range, ...]
    seconds: float
    tokens: int
    ranks: int
    windows: tuple[int, ...] = (0,)


def sharing_group(mesh: Mesh) -> ContextGroup | None:
    """The largest group of this rank that may share documents, where meetings are timed: None on a GPU, and without
    such groups."""
    if mesh.device.type != "cpu" or not mesh.context:
        return None
    return max(mesh.context.values(), key=lambda group: group.size)


def shared_packs(longest: int, ranks: int) -> tuple[tuple[int, ...], ...]:
    """Tokens a rank of the documents of every pack that is timed; no document is longer than `longest` tokens."""
    fitting = tuple(pack for pack in _SHARED_PACKS if max(pack) * ranks <= longest)
    return fitting or ((max(1, longest // ranks),),)


def mean_shared(repeats: Sequence[SharedSample]) -> SharedSample:
    """Repeats of one pack as one sample: their mean, because a step adds up many meetings, of which a few are long; but
    for the shortest and the longest twentieth, which are rarer than what a step holds."""
    left_out = len(repeats) // 20
    seconds = sorted(one.seconds for one in repeats)[left_out : len(repeats) - left_out]
    return repeats[0]._replace(seconds=statistics.fmean(seconds))


def time_shared(
    stage: PipelineStage, lengths: Sequence[int], group: ContextGroup, clock: PackClock
) -> Iterator[SharedSample]:
    """Forward, then backward, of a pack; seconds of all layers. Adds to gradients. Collective over the group.

    Args:
        lengths: tokens a rank of every document.
    """
    rows = shared_documents([tokens * group.size for tokens in lengths], group.size)
    own = rows.ranges(group.rank)
    positions = torch.cat([torch.arange(start, stop, device=stage.device) for _, start, stop in own])
    attention = GatherAttention(rows, group, "a pack of the calibration", stage.device)
    nothing = torch.zeros_like(positions)
    pack = PackTokens(own, nothing, nothing, positions, shared=attention, closes=rows.held(group.rank))
    num_tokens = {piece.document.doc_id: piece.stop for piece in rows.shared}
    stage.begin_step(num_tokens)
    stored = {piece.document.doc_id: piece.document.rows_before(group.rank, piece.stop) for piece in rows.shared}
    store = ActivationStore(stored, [own], shard=stage.row_shard)
    dist.barrier(group=group.process_group)
    passes: tuple[Direction, ...] = ("forward", "backward")
    for direction in passes:
        given = torch.randn(stage.num_rows(own), stage.hidden_size, dtype=stage.dtype, device=stage.device)
        layers = stage.forward_layers if direction == "forward" else stage.backward_layers
        took = clock.time((direction, own, "shared"), functools.partial(layers, pack, given, store))
        yield SharedSample(direction, own, took.device_s, sum(num_tokens.values()), group.size)
