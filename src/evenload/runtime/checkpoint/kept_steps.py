"""`KeptSteps`: the state after the last finished step, in shared memory, where it outlives every rank.

Each rank has a folder with two slots and a mark. After the update of step n its shards, which nobody else has, are
copied into slot `n % 2`; when the step is finished and told, its mark says n:

    rank 0    slot 0 [step 6]   slot 1 [step 7]   mark 7          all ranks have step 6 at least, so survivors
    rank 1    slot 0 [step 6]   slot 1 [torn  ]   mark 6 (dead)   go on after step 6, the smallest mark

All or none: a rank writes over the slot of step n - 1 only after the gradient norm of step n + 1, which sums what all
ranks give, and a rank begins a step only behind a barrier that all come to with the mark of the step before. So two
marks differ by one at most, and the step of the smallest one is whole on every rank, wherever who was killed. The same
holds in a change of the layout, in a checkpoint and in going on itself, because nothing but the slots is read.

    round-0/rank-0/slot-0/    state.<elements>.<type>, pieces.json (of which tensor what lies where), position.json
                   slot-1/
                   mark.json
            rank-1/...
    round-1/...               ranks that went on after a loss; the round before goes when all have a mark in this one

A round may end before all have a mark in it, or before the one before has gone; the next one goes on from one of them,
and the others go before it writes (`keep_only`). So a rank never has more than two slots: that from which the round
went on beside its first one, or its own two.

Pieces are boxes of whole tensors, as in checkpoints, so any layout takes over from any other.

Price: 2 · (weights + optimizer state) / (dp·cp) bytes a rank, and one copy of a shard in memory a step, which training
waits for. Keeping the live state itself in shared memory would take one slot less and hide the copy behind the next
step, but then every place where a layout change frees or moves memory has to wait for that copy.
"""

import contextlib
import math
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
from torch import Tensor

from evenload.cost.coefficients import CostCoefficients
from evenload.errors import CheckpointError
from evenload.runtime.checkpoint.checkpoint import Progress, RunPosition
from evenload.runtime.checkpoint.pieces import TensorPieces, overlap
from evenload.runtime.checkpoint.shared_memory import SharedTensors, shared_tensor
from evenload.types.base import Frozen

SURVIVOR_MEMORY = "train.survivor_memory = 'shared'"
_STATE, _PIECES, _POSITION, _MARK = "state", "pieces.json", "position.json", "mark.json"


class _Mark(Frozen):
    """mark.json: a rank has all of its state after so many steps; `num_ranks` are in the round."""

    num_ranks: int
    steps_done: int


class _KeptPiece(Frozen, array_like=True):
    """A box of a whole tensor, from element `start` of the slot's state on."""

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int


class _KeptPosition(Frozen):
    """position.json: `RunPosition` and where it belongs."""

    progress: Progress
    loader: bytes
    coefficients: CostCoefficients | None


class KeptSteps:
    """What one rank keeps in one round.

    Args:
        directory: of the whole run, the same for all ranks and rounds.
        number: of the round.
        rank: any name of this process among those of the round.
        num_ranks: in the round.
    """

    def __init__(self, directory: Path, number: int, rank: int, num_ranks: int) -> None:
        self._directory, self._number, self._num_ranks = directory, number, num_ranks
        self._folder = directory / f"round-{number}" / f"rank-{rank}"
        self._states: list[tuple[list[_KeptPiece], list[Tensor]]] = [([], []), ([], [])]
        self._first: int | None = None

    def write(self, steps_done: int, tensors: Mapping[str, TensorPieces]) -> None:
        """Copy what this rank alone has after so many steps. All ranks have come to this step's norm, or begin.

        Args:
            tensors: of one type, the same names and boxes in every step of a layout.

        Raises:
            ConfigError: there is no room.
        """
        if self._first is None:
            self._first = steps_done
        elif steps_done > self._first:
            self._drop_earlier_rounds()
        slot = self._slot(steps_done)
        pieces = list(_placed(tensors))
        if not slot.is_dir() or self._states[steps_done % 2][0] != pieces:
            self._states[steps_done % 2] = [], []  # else its pages would stay, mapped, beside those that are taken now
            self._states[steps_done % 2] = pieces, _made(slot, pieces, tensors)
        parts = (piece.local for tensor in tensors.values() for piece in tensor.pieces)
        for kept, part in zip(self._states[steps_done % 2][1], parts, strict=True):
            kept.copy_(part)

    def mark(self, steps_done: int, position: RunPosition | None) -> None:
        """The step is finished, and its metrics are written.

        Args:
            position: of the run after it, from one rank; None on the others.
        """
        if position is not None:
            text = _KeptPosition(progress=position.progress, loader=position.loader, coefficients=position.coefficients)
            (self._slot(steps_done) / _POSITION).write_bytes(msgspec.json.encode(text))
        partial = self._folder / f"{_MARK}.partial"
        partial.write_bytes(msgspec.json.encode(_Mark(num_ranks=self._num_ranks, steps_done=steps_done)))
        partial.replace(self._folder / _MARK)

    def last(self) -> "KeptStep | None":
        """`last_kept` of the rounds before."""
        return last_kept(self._directory, self._number)

    def keep_only(self, step: "KeptStep | None") -> None:
        """Let go of the memory of all earlier rounds but that of the step from which this one goes on. Before anything
        is written; all ranks know the step, and none looks for it any more."""
        for path in _earlier_rounds(self._directory, self._number):
            if step is None or path not in step.rounds:
                shutil.rmtree(path, ignore_errors=True)  # others do so, too
        if step is not None:
            for slot in step.slots:
                shutil.rmtree(slot.with_name(f"slot-{1 - step.steps_done % 2}"), ignore_errors=True)

    def _slot(self, steps_done: int) -> Path:
        return self._folder / f"slot-{steps_done % 2}"

    def _drop_earlier_rounds(self) -> None:
        for path in _earlier_rounds(self._directory, self._number):
            shutil.rmtree(path, ignore_errors=True)  # others do so, too


@dataclass(frozen=True)
class KeptStep:
    """The state after a step, in the slots of those who trained it."""

    steps_done: int
    slots: tuple[Path, ...]

    @property
    def rounds(self) -> frozenset[Path]:
        """Folders of the round that trained it; one."""
        return frozenset(slot.parent.parent for slot in self.slots)

    def position(self) -> RunPosition:
        (path,) = (slot / _POSITION for slot in self.slots if (slot / _POSITION).is_file())
        found = msgspec.json.decode(path.read_bytes(), type=_KeptPosition)
        return RunPosition(progress=found.progress, loader=found.loader, coefficients=found.coefficients)

    def fill(self, wanted: Iterable[tuple[str, TensorPieces]]) -> None:
        """Copy into boxes of tensors, by name, what belongs there.

        Raises:
            CheckpointError: not every element of them is kept, or one is kept twice.
        """
        kept: dict[str, list[tuple[_KeptPiece, Tensor]]] = {}
        for slot in self.slots:
            pieces = msgspec.json.decode((slot / _PIECES).read_bytes(), type=list[_KeptPiece])
            state = shared_tensor(slot, _STATE)
            for piece in pieces:
                assert state is not None
                kept.setdefault(piece.name, []).append((piece, _box(state, piece)))
        for name, tensor in wanted:
            for piece in tensor.pieces:
                found = sum(_copied(source, piece.offsets, piece.local, box) for source, box in kept.get(name, []))
                if found != piece.local.numel():
                    raise CheckpointError(
                        f"after step {self.steps_done} {found} of {piece.local.numel()} elements of '{name}' from "
                        f"{list(piece.offsets)} on are kept in shared memory; start the run again to go on from its "
                        "last checkpoint"
                    )


def last_kept(directory: Path, before_round: int) -> KeptStep | None:
    """The last step that all ranks of an earlier round have; None = there is none. To be asked when these are dead or
    have left their round; the same for whoever asks then, until all have a mark in a later round."""
    for path in _earlier_rounds(directory, before_round):
        marks: dict[Path, _Mark] = {}
        for mark in path.glob(f"rank-*/{_MARK}"):
            with contextlib.suppress(FileNotFoundError):  # of a round that others are letting go
                marks[mark.parent] = msgspec.json.decode(mark.read_bytes(), type=_Mark)
        if marks and len(marks) == max(mark.num_ranks for mark in marks.values()):
            steps_done = min(mark.steps_done for mark in marks.values())
            return KeptStep(steps_done, tuple(folder / f"slot-{steps_done % 2}" for folder in sorted(marks)))
    return None


def _earlier_rounds(directory: Path, before_round: int) -> list[Path]:
    """Latest first."""
    numbers = sorted((int(path.name.removeprefix("round-")) for path in directory.glob("round-*")), reverse=True)
    return [directory / f"round-{number}" for number in numbers if number < before_round]


def _placed(tensors: Mapping[str, TensorPieces]) -> Iterator[_KeptPiece]:
    start = 0
    for name, tensor in tensors.items():
        for piece in tensor.pieces:
            sizes = tuple(piece.local.shape)
            yield _KeptPiece(name=name, offsets=piece.offsets, sizes=sizes, start=start)
            start += piece.local.numel()


def _made(slot: Path, pieces: list[_KeptPiece], tensors: Mapping[str, TensorPieces]) -> list[Tensor]:
    """The memory of a slot anew, by piece."""
    shutil.rmtree(slot, ignore_errors=True)
    memory = SharedTensors(slot, SURVIVOR_MEMORY)
    (slot / _PIECES).write_bytes(msgspec.json.encode(pieces))
    parts = [piece.local for tensor in tensors.values() for piece in tensor.pieces]
    if not parts:
        return []
    state = memory.make(_STATE, sum(part.numel() for part in parts), parts[0].dtype)
    return [_box(state, piece) for piece in pieces]


def _box(state: Tensor, piece: _KeptPiece) -> Tensor:
    return state[piece.start : piece.start + math.prod(piece.sizes)].view(piece.sizes)


def _copied(source: _KeptPiece, offsets: tuple[int, ...], local: Tensor, box: Tensor) -> int:
    """Copy what two boxes share; how many elements."""
    shared = overlap(offsets, tuple(local.shape), source.offsets, source.sizes)
    if shared is None:
        return 0
    low, lengths = shared
    target = local[tuple(slice(at - a, at - a + n) for at, a, n in zip(low, offsets, lengths, strict=True))]
    target.copy_(box[tuple(slice(at - b, at - b + n) for at, b, n in zip(low, source.offsets, lengths, strict=True))])
    return target.numel()
