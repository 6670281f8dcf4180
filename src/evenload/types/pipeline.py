"""`PipelineTasks` and `ActionColumns`: the numeric input of schedules and of the simulator.

Both are flat numpy columns because planners build and simulate hundreds of candidates a step.
"""

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenload.types.schedule import Action, ActionKind, Schedule
from evenload.types.timeline import KINDS


@dataclass(frozen=True, eq=False, kw_only=True)
class SplitBackward:
    """Backward packs as two actions (zero bubble): I on the critical path, W any time later on the same stage.

    I gives the gradient of the pack's input, which the stage before waits for; W adds the gradients of the weights
    and needs nothing but what I left: inputs and output gradients of the matrix products.

    Args:
        input_s, weight_s: float64[m_b, P] seconds of I and W; their sum is `PipelineTasks.backward_s` to rounding, or
            more where W makes transfers again.
        input_freed_bytes: int64[m_b, P], given back when I ends; negative where I leaves more than it found.
        input_temp_bytes: int64[m_b, P], held while I runs, what it leaves for W included.
        weight_freed_bytes: int64[m_b, P], given back when W ends; with `input_freed_bytes` the whole backward's.
    """

    input_s: NDArray[np.float64]
    weight_s: NDArray[np.float64]
    input_freed_bytes: NDArray[np.int64]
    input_temp_bytes: NDArray[np.int64]
    weight_freed_bytes: NDArray[np.int64]


@dataclass(frozen=True, eq=False, kw_only=True)
class PipelineTasks:
    """One replica's packs as durations, dependencies and bytes. P = virtual stages, R = pipeline ranks.

    Data dependencies: F(k, s) needs F(k, s-1) plus one hop; B(j, s) needs B(j, s+1) plus one hop;
    B(j, s) needs the forwards `0 .. forwards_needed[j]-1` on its own stage.

    Args:
        forward_s: float64[m_f, P] seconds; backward_s: float64[m_b, P].
        p2p_forward_s: float64[m_f] seconds of one hop to the next stage; p2p_backward_s: float64[m_b].
        forwards_needed: int32[m_b], non-negative, `D[j]` of DESIGN §7; not necessarily sorted.
        stage_to_rank: int32[P], the pipeline rank of every virtual stage.
        static_bytes: int64[R], weights, gradients and optimizer state.
        forward_kept_bytes: int64[m_f, P], held from the start of that forward on.
        forward_temp_bytes: int64[m_f, P], held only while it runs.
        backward_freed_bytes: int64[m_b, P], given back when that backward ends.
        backward_temp_bytes: int64[m_b, P], held only while it runs.
        split: how backwards divide into I and W; None = they run whole.
    """

    forward_s: NDArray[np.float64]
    backward_s: NDArray[np.float64]
    p2p_forward_s: NDArray[np.float64]
    p2p_backward_s: NDArray[np.float64]
    forwards_needed: NDArray[np.int32]
    stage_to_rank: NDArray[np.int32]
    static_bytes: NDArray[np.int64]
    forward_kept_bytes: NDArray[np.int64]
    forward_temp_bytes: NDArray[np.int64]
    backward_freed_bytes: NDArray[np.int64]
    backward_temp_bytes: NDArray[np.int64]
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
        return len(self.static_bytes)


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

    @property
    def num_ranks(self) -> int:
        """Pipeline ranks."""
        return len(self.rank_offset) - 1

    def to_schedule(self) -> Schedule:
        """The same orders as objects."""
        kind, stage, pack = self.kind.tolist(), self.stage.tolist(), self.pack.tolist()
        offset = self.rank_offset.tolist()
        names: list[ActionKind] = ["F", "B", "I", "W"]
        return Schedule(
            ranks=tuple(
                tuple(Action(kind=names[kind[i]], stage=stage[i], pack=pack[i]) for i in range(lo, hi))
                for lo, hi in itertools.pairwise(offset)
            )
        )


def action_columns(schedule: Schedule) -> ActionColumns:
    """Inverse of `ActionColumns.to_schedule`."""
    flat = [action for row in schedule.ranks for action in row]
    return ActionColumns(
        kind=np.array([KINDS.index(a.kind) for a in flat], dtype=np.uint8),
        stage=np.array([a.stage for a in flat], dtype=np.int32),
        pack=np.array([a.pack for a in flat], dtype=np.int32),
        rank_offset=np.cumsum([0, *(len(row) for row in schedule.ranks)], dtype=np.int64),
    )
