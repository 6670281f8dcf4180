"""`StateArrival`: optimizer state on its way to its owners in a new layout, behind the step that already runs in it.

A thread takes memory, posts all receives and sends in the order of the moves, copies what this rank keeps, and waits.
Nothing of a step needs the state before its optimizer update, which waits for the thread. What was left behind is freed
then. On gloo transfers run while others compute; their share of cores and memory is what hiding them costs.
"""

import threading
import time
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from evenload.plan.reconfiguration.moves import Move, state_share
from evenload.runtime.comm.mesh import Mesh
from evenload.runtime.optim.parameter_units import padded_size
from evenload.runtime.stages.live_pieces import LivePiece

Shards = Mapping[str, Tensor]
"""Of one piece on one rank, its shard of every tensor of the optimizer, by name."""


class StateArrival:
    """One switch's optimizer state on one rank.

    Args:
        old, new: meshes of both layouts.
        before: by piece, what this rank owned in the old one.
    """

    def __init__(
        self, pieces: Sequence[LivePiece], moves: Sequence[Move], old: Mesh, new: Mesh, before: Mapping[int, Shards]
    ) -> None:
        self.received_bytes = 0
        self._pieces, self._moves, self._old, self._new, self._before = pieces, moves, old, new, before
        self._after: dict[int, Shards] = {}
        self._error: BaseException | None = None
        # A daemon: when training fails, the process must end although this thread may wait for a dead rank.
        self._thread = threading.Thread(target=self._run, name="evenload-state", daemon=True)
        self._thread.start()

    def wait(self) -> tuple[dict[int, Shards], float]:
        """By piece what this rank owns in the new layout, and the seconds that this call waited for it. Raises what
        went wrong."""
        from_s = time.perf_counter()
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._after, time.perf_counter() - from_s

    def _run(self) -> None:
        try:
            self._move()
        except BaseException as error:
            self._error = error

    def _move(self) -> None:
        mine = {index: self._target(index) for index, live in enumerate(self._pieces) if self._owns(index, live)}
        ops = []
        for move in self._moves:
            if move.target == self._new.rank:
                for tensor in _parts(mine[move.piece][1], mine[move.piece][0], move):
                    ops.append(dist.P2POp(dist.irecv, tensor, move.source, self._new.moving))
                    self.received_bytes += tensor.nbytes
            elif move.source == self._new.rank:
                share = state_share(self._old.layout, self._pieces[move.piece].piece, self._old.data_rank)
                parts = _parts(self._before[move.piece], share, move)
                ops += [dist.P2POp(dist.isend, part, move.target, self._new.moving) for part in parts]
        with self._new.watch.waiting("optimizer state of the new layout"):
            works = dist.batch_isend_irecv(ops) if ops else []
        for index, (wanted, shards) in mine.items():
            if index in self._before:
                self._keep(index, wanted, shards)
        with self._new.watch.waiting("optimizer state of the new layout"):
            for work in works:
                work.wait()
        self._after = {index: shards for index, (_, shards) in mine.items()}

    def _owns(self, index: int, live: LivePiece) -> bool:
        return live.is_held and bool(live.state_names)

    def _target(self, index: int) -> tuple[tuple[int, int], Shards]:
        """The elements that this rank is to own, and where their state goes: the old memory where it is the same."""
        live = self._pieces[index]
        wanted = state_share(self._new.layout, live.piece, self._new.data_rank)
        size = padded_size(live.piece.num_elements, self._new.data_size) // self._new.data_size
        kept = self._before.get(index)
        if kept is not None:
            had = state_share(self._old.layout, live.piece, self._old.data_rank)
            if had == wanted and kept[live.state_names[0]].numel() == size:
                return wanted, kept
        assert live.buffer is not None
        shards: dict[str, Tensor] = {}
        for name in live.state_names:
            shards[name] = torch.empty(size, dtype=live.buffer.grads.dtype, device=self._new.device)
            shards[name][wanted[1] - wanted[0] :].zero_()
        return wanted, shards

    def _keep(self, index: int, wanted: tuple[int, int], shards: Shards) -> None:
        """Copy what this rank owned and still owns, unless it lies where it did."""
        before = self._before[index]
        if shards is before:
            return
        had = state_share(self._old.layout, self._pieces[index].piece, self._old.data_rank)
        start, stop = max(had[0], wanted[0]), min(had[1], wanted[1])
        for name, shard in shards.items():
            if start < stop:
                shard[start - wanted[0] : stop - wanted[0]].copy_(before[name][start - had[0] : stop - had[0]])


def _parts(shards: Shards, share: tuple[int, int], move: Move) -> list[Tensor]:
    """Of every tensor the elements of a move, in the order of their names."""
    return [shard[move.start - share[0] : move.stop - share[0]] for shard in shards.values()]
