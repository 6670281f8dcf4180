"""Hold packs and schedules as flat numpy columns for the simulator: `PipelineTasks`, `ActionColumns`."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evenload.types.plan import Action, ActionKind, Schedule
from evenload.types.timeline import KINDS, joined


class _PackRows:
    """Base of dataclasses whose columns all have a row a pack, but `static_bytes`."""

    @classmethod
    def pack_columns(cls) -> tuple[str, ...]:
        """Return the names of the columns that have a row a pack."""
        return tuple(field.name for field in fields(cls) if field.name != "static_bytes")  # type: ignore[arg-type]

    def rows(self, packs: slice) -> Self:
        """Return some packs, the same forward and backward."""
        return replace(self, **{name: getattr(self, name)[packs] for name in self.pack_columns()})  # type: ignore[type-var]

    @classmethod
    def concat(cls, parts: Sequence[Self]) -> Self:
        """Concatenate packs, on the same ranks."""
        return replace(parts[0], **joined(parts, cls.pack_columns()))  # type: ignore[type-var]


@dataclass(frozen=True, eq=False, kw_only=True)
class SplitBackward(_PackRows):
    """Backward packs as two actions (zero bubble): I gives the gradient of the input, which the stage before waits for;
    W, any time later on the same stage, the gradients of the weights, from what I kept for it: inputs and output
    gradients of the matrix products.

    Args:
        input_s, weight_s: float64[m_b, P] seconds of I and W; their sum is `PipelineTasks.backward_s` to rounding, or
            more where W makes transfers again.
        input_freed_bytes: int64[m_b, P], freed when I ends; negative where I keeps more than it frees.
        input_temp_bytes: int64[m_b, P], held while I runs, what it keeps for W included.
        weight_freed_bytes: int64[m_b, P], freed when W ends; with `input_freed_bytes` the whole backward's.
    """

    input_s: NDArray[np.float64]
    weight_s: NDArray[np.float64]
    input_freed_bytes: NDArray[np.int64]
    input_temp_bytes: NDArray[np.int64]
    weight_freed_bytes: NDArray[np.int64]


@dataclass(frozen=True, eq=False, kw_only=True)
class PackBytes(_PackRows):
    """Bytes that one replica's packs hold. P = virtual stages, R = pipeline ranks.

    Args:
        static_bytes: int64[R], weights, gradients and optimizer state.
        forward_kept_bytes: int64[m_f, P], held from the start of that forward on.
        forward_temp_bytes: int64[m_f, P], held only while it runs.
        backward_freed_bytes: int64[m_b, P], freed when that backward ends.
        backward_temp_bytes: int64[m_b, P], held only while it runs.
    """

    static_bytes: NDArray[np.int64]
    forward_kept_bytes: NDArray[np.int64]
    forward_temp_bytes: NDArray[np.int64]
    backward_freed_bytes: NDArray[np.int64]
    backward_temp_bytes: NDArray[np.int64]

    @classmethod
    def nothing(cls, num_forward: int, num_backward: int, num_stages: int, num_ranks: int) -> "PackBytes":
        """Make the bytes of packs and ranks that hold nothing, where only times matter."""
        rows = {"forward": num_forward, "backward": num_backward}
        return cls(
            static_bytes=np.zeros(num_ranks, np.int64),
            **{name: np.zeros((rows[name.split("_")[0]], num_stages), np.int64) for name in cls.pack_columns()},
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class PipelineTasks:
    """One replica's packs as durations, dependencies and bytes. P = virtual stages, R = pipeline ranks.

    F(k, s) needs F(k, s-1) and a transfer; B(j, s) needs B(j, s+1) and a transfer, and those of the forwards
    `0 .. forwards_needed[j]-1` of its stage that its rank runs.

    Args:
        forward_s: float64[m_f, P] seconds; backward_s: float64[m_b, P].
        p2p_forward_s: float64[m_f] seconds of one transfer to the next stage; p2p_backward_s: float64[m_b].
        forwards_needed: int32[m_b], `D[j]` of `docs/architecture.md`; not necessarily sorted.
        stage_to_rank: int32[P], the pipeline rank of every virtual stage, where R > P the first of several: pack k runs
            on number k % width.
        held: what the packs hold.
        split: how backwards divide into I and W; None = they run whole.
    """

    forward_s: NDArray[np.float64]
    backward_s: NDArray[np.float64]
    p2p_forward_s: NDArray[np.float64]
    p2p_backward_s: NDArray[np.float64]
    forwards_needed: NDArray[np.int32]
    stage_to_rank: NDArray[np.int32]
    held: PackBytes
    split: SplitBackward | None = None

    @property
    def num_forward(self) -> int:
        """Forward packs, m_f."""
        return self.forward_s.shape[0]

    @property
    def num_backward(self) -> int:
        """Backward packs, m_b."""
        return self.backward_s.shape[0]

    @property
    def num_stages(self) -> int:
        """Virtual stages, P."""
        return len(self.stage_to_rank)

    @property
    def num_ranks(self) -> int:
        """Pipeline ranks, R."""
        return len(self.held.static_bytes)

    @property
    def widths(self) -> NDArray[np.int64]:
        """Pipeline ranks of every stage; int64[P]."""
        if self.num_ranks <= self.num_stages:
            return np.ones(self.num_stages, np.int64)
        return np.diff(self.stage_to_rank.astype(np.int64), append=self.num_ranks)

    @classmethod
    def without_bytes(
        cls,
        *,
        forward_s: NDArray[np.float64],
        backward_s: NDArray[np.float64],
        p2p_forward_s: NDArray[np.float64],
        p2p_backward_s: NDArray[np.float64],
        forwards_needed: Sequence[int],
        stage_to_rank: Sequence[int],
        parts_s: tuple[NDArray[np.float64], NDArray[np.float64]] | None = None,
        num_ranks: int | None = None,
    ) -> "PipelineTasks":
        """Make packs that hold nothing, where only times matter: `parts_s` of I and W (None = backwards run whole), on
        `num_ranks` pipeline ranks (None = one for every number in `stage_to_rank`)."""
        num_forward, num_stages = forward_s.shape
        num_backward = len(backward_s)
        num_ranks = max(stage_to_rank, default=-1) + 1 if num_ranks is None else num_ranks
        held = PackBytes.nothing(num_forward, num_backward, num_stages, num_ranks)
        split = None
        if parts_s is not None:
            split = SplitBackward(
                input_s=parts_s[0],
                weight_s=parts_s[1],
                input_freed_bytes=held.backward_freed_bytes,
                input_temp_bytes=held.backward_temp_bytes,
                weight_freed_bytes=held.backward_freed_bytes,
            )
        return cls(
            forward_s=forward_s,
            backward_s=backward_s,
            p2p_forward_s=p2p_forward_s,
            p2p_backward_s=p2p_backward_s,
            forwards_needed=np.array(forwards_needed, np.int32),
            stage_to_rank=np.array(stage_to_rank, np.int32),
            held=held,
            split=split,
        )

    def rows(self, first: int, last: int) -> "PipelineTasks":
        """Return the packs `[first, last)` of whole documents, whose backward needs the forward of the same pack."""
        packs = slice(first, last)
        return replace(
            self,
            forwards_needed=self.forwards_needed[packs] - np.int32(first),
            held=self.held.rows(packs),
            split=self.split and self.split.rows(packs),
            **{name: getattr(self, name)[packs] for name in _SECONDS},
        )

    @classmethod
    def concat(cls, parts: Sequence["PipelineTasks"]) -> "PipelineTasks":
        """Concatenate packs; all are priced with I and W, or none."""
        before = np.cumsum([0, *(part.num_forward for part in parts)])
        needed = [part.forwards_needed + count for part, count in zip(parts, before, strict=False)]
        splits = [part.split for part in parts if part.split is not None]
        assert len(splits) in (0, len(parts)), "some parts are priced with I and W, some without"
        return replace(
            parts[0],
            forwards_needed=np.concatenate(needed).astype(np.int32),
            held=PackBytes.concat([part.held for part in parts]),
            split=SplitBackward.concat(splits) if splits else None,
            **joined(parts, _SECONDS),
        )


_SECONDS = ("forward_s", "backward_s", "p2p_forward_s", "p2p_backward_s")


@dataclass(frozen=True, eq=False)
class ActionColumns:
    """A schedule as columns: rank r runs actions `[rank_offset[r], rank_offset[r+1])` in order.

    Args:
        kind: uint8[n], index into `KINDS`; stage, pack: int32[n]; rank_offset: int64[R + 1].
    """

    kind: NDArray[np.uint8]
    stage: NDArray[np.int32]
    pack: NDArray[np.int32]
    rank_offset: NDArray[np.int64]

    @classmethod
    def of_ranks(cls, rows: Sequence[tuple[ArrayLike, ArrayLike, ArrayLike]]) -> "ActionColumns":
        """Make columns from kinds, stages and packs of every rank's actions in order."""
        kind, stage, pack = (np.concatenate([(), *(row[column] for row in rows)]) for column in range(3))
        offset = np.cumsum([0, *(np.size(kinds) for kinds, _, _ in rows)], dtype=np.int64)
        return cls(kind.astype(np.uint8), stage.astype(np.int32), pack.astype(np.int32), offset)

    @property
    def num_ranks(self) -> int:
        """Pipeline ranks."""
        return len(self.rank_offset) - 1

    @property
    def rank(self) -> NDArray[np.int64]:
        """Pipeline rank of every action; int64[n]."""
        return np.repeat(np.arange(self.num_ranks), np.diff(self.rank_offset))

    def of_rank(self, rank: int) -> slice:
        """Return the slice of a rank's actions."""
        return slice(int(self.rank_offset[rank]), int(self.rank_offset[rank + 1]))

    def to_schedule(self) -> Schedule:
        """Return the schedule as objects."""
        names: list[ActionKind] = ["F", "B", "I", "W"]
        rows = zip(self.kind.tolist(), self.stage.tolist(), self.pack.tolist(), strict=True)
        actions = tuple(Action(kind=names[kind], stage=stage, pack=pack) for kind, stage, pack in rows)
        return Schedule(ranks=tuple(actions[lo:hi] for lo, hi in itertools.pairwise(self.rank_offset.tolist())))


def action_columns(schedule: Schedule) -> ActionColumns:
    """Return a schedule of objects as columns."""
    rows = [
        ([KINDS.index(a.kind) for a in row], [a.stage for a in row], [a.pack for a in row]) for row in schedule.ranks
    ]
    return ActionColumns.of_ranks(rows)
