"""Define `ScheduleRule`, one way to order the packs of a pipeline, and `static_order`, which makes orders of two
sequences."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenload.errors import ConfigError
from evenload.types.pipeline import ActionColumns, PipelineTasks

UNLIMITED_BYTES = 2**62
"""Memory of a rank without a limit."""


@dataclass(frozen=True, kw_only=True)
class ScheduleRule:
    """How every pipeline rank orders its packs.

    Args:
        name: `plan.options.schedule`.
        description: in one line.
        order: makes the order of at least one pack from priced packs and the bytes that ranks should not exceed,
            int64[R].
        splits_backward: runs backwards as I and W, so packs are priced with both.
        needs_equal_packs: backward packs have to be the forward packs, in the same order.
        one_stage_per_rank: virtual stages are refused.
        reads_times: the order depends on durations or memory, not only on the number of packs and their dependencies.
        runs_replicated_stages: supports stages of several ranks that take packs in turn (`stage_devices`).
        tried_by_auto: `auto` also runs its packs under this rule.
    """

    name: str
    description: str
    order: Callable[[PipelineTasks, NDArray[np.int64]], ActionColumns]
    splits_backward: bool = False
    needs_equal_packs: bool = False
    one_stage_per_rank: bool = False
    reads_times: bool = False
    runs_replicated_stages: bool = False
    tried_by_auto: bool = False

    def actions(self, tasks: PipelineTasks, cap_bytes: NDArray[np.int64] | None) -> ActionColumns:
        """Order any packs, also none, within int64[R] bytes (None = no limit); `ConfigError` where packs or stages do
        not suit the rule."""
        if tasks.num_ranks > tasks.num_stages and not self.runs_replicated_stages:
            raise ConfigError(
                f"schedule {self.name}: stages have {tasks.widths.tolist()} ranks, and it knows one rank a stage; use "
                "1f1b"
            )
        if not tasks.num_forward:
            return ActionColumns.of_ranks([((), (), ())] * tasks.num_ranks)
        cap = np.full(tasks.num_ranks, UNLIMITED_BYTES, np.int64) if cap_bytes is None else cap_bytes
        return self.order(tasks, cap)


def static_order(tasks: PipelineTasks, forward_counts: NDArray[np.int64], warmup: NDArray[np.int64]) -> ActionColumns:
    """Order packs by two sequences (docs/architecture.md): stage s runs B_j after `min(m_f, f[j] + w[s])` forwards.

    With the key (k - w[s], s) of F(k, s) and (f[j] - 1/2, j, -s) of B(j, s) every edge goes to a larger key, so nothing
    deadlocks, also on ranks with several stages, and on stages with several ranks, which take packs in turn: every rank
    sorts its actions by key. O(actions log actions).

    Args:
        forward_counts: int64[m_b], f: forwards of the last stage before its backward j; not falling, `f[j] >= D[j]`.
        warmup: int64[P], w: forwards that stage s runs ahead of the last stage; not rising.

    Raises:
        ConfigError: f or w break these conditions.
    """
    m_f, m_b, num_stages = tasks.num_forward, tasks.num_backward, tasks.num_stages
    _check(tasks, forward_counts, warmup)
    per_stage = m_f + m_b
    # Doubled first keys stay integers: 2 (k - w[s]) and 2 f[j] - 1.
    first = np.empty((num_stages, per_stage), dtype=np.int64)
    first[:, :m_f] = 2 * (np.arange(m_f) - warmup[:, None])
    first[:, m_f:] = 2 * forward_counts - 1
    pack = np.concatenate([np.arange(m_f, dtype=np.int32), np.arange(m_b, dtype=np.int32)])
    stage = np.arange(num_stages, dtype=np.int32)[:, None]
    # Equal first keys are of one kind: forwards are sorted by stage, backwards by pack, then from the last stage down.
    last = np.empty_like(first)
    last[:, :m_f] = stage
    last[:, m_f:] = np.arange(m_b) * num_stages + (num_stages - 1 - stage)
    rank = (tasks.stage_to_rank[:, None] + pack % tasks.widths[:, None]).ravel()
    order = np.lexsort((last.ravel(), first.ravel(), rank))
    is_backward = np.zeros(per_stage, dtype=np.uint8)
    is_backward[m_f:] = 1
    return ActionColumns(
        kind=np.tile(is_backward, num_stages)[order],
        stage=np.repeat(stage.ravel(), per_stage)[order],
        pack=np.tile(pack, num_stages)[order],
        rank_offset=np.concatenate([[0], np.cumsum(np.bincount(rank, minlength=tasks.num_ranks))]).astype(np.int64),
    )


def _check(tasks: PipelineTasks, forward_counts: NDArray[np.int64], warmup: NDArray[np.int64]) -> None:
    if forward_counts.shape != (tasks.num_backward,) or warmup.shape != (tasks.num_stages,):
        raise ConfigError(
            f"static order: forward_counts {forward_counts.shape} for {tasks.num_backward} backward packs, "
            f"warmup {warmup.shape} for {tasks.num_stages} stages"
        )
    if (warmup < 0).any() or (np.diff(warmup) > 0).any():
        raise ConfigError(f"static order: warmup {warmup.tolist()} must fall or stay from stage to stage, down to >= 0")
    bad = (forward_counts < tasks.forwards_needed) | (forward_counts > tasks.num_forward)
    bad[1:] |= np.diff(forward_counts) < 0
    if bad.any():
        j = int(bad.argmax())
        raise ConfigError(
            f"static order: forward_counts[{j}] = {forward_counts[j]} must not fall, be at least "
            f"{tasks.forwards_needed[j]} (forwards it needs) and at most {tasks.num_forward}"
        )
