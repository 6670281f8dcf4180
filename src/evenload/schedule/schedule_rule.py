"""`ScheduleRule`: one way to order the packs of a pipeline, in one record."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenload.errors import ConfigError
from evenload.types.pipeline import ActionColumns, PipelineTasks

UNLIMITED_BYTES = 2**62
"""A rank's memory where no limit is given."""


@dataclass(frozen=True, kw_only=True)
class ScheduleRule:
    """How every pipeline rank orders its packs.

    Args:
        name: `plan.options.schedule`.
        description: in one line.
        order: priced packs and int64[R] bytes that every rank should not exceed, to the order; at least one pack.
        splits_backward: runs backwards as I and W, so the packs are priced with both.
        needs_equal_packs: backward packs have to be the forward packs, in the same order.
        one_stage_per_rank: virtual stages are refused.
        reads_times: the order depends on durations or memory, not on the number of packs and their dependencies alone.
        deals_packs: knows stages of several ranks, whose packs go round them (`ParallelLayout.stage_devices`).
        tried_by_auto: `auto` also runs the packs that it found under this rule.
    """

    name: str
    description: str
    order: Callable[[PipelineTasks, NDArray[np.int64]], ActionColumns]
    splits_backward: bool = False
    needs_equal_packs: bool = False
    one_stage_per_rank: bool = False
    reads_times: bool = False
    deals_packs: bool = False
    tried_by_auto: bool = False

    def actions(self, tasks: PipelineTasks, cap_bytes: NDArray[np.int64] | None) -> ActionColumns:
        """The order of any packs, also of none.

        Args:
            cap_bytes: int64[R]; None = no limit.

        Raises:
            ConfigError: the packs or the stages do not suit the rule.
        """
        if tasks.num_ranks > tasks.num_stages and not self.deals_packs:
            raise ConfigError(
                f"schedule {self.name}: stages have {tasks.widths.tolist()} ranks, and it knows one rank a stage; use "
                "1f1b"
            )
        if not tasks.num_forward:
            return ActionColumns.of_ranks([((), (), ())] * tasks.num_ranks)
        cap = np.full(tasks.num_ranks, UNLIMITED_BYTES, np.int64) if cap_bytes is None else cap_bytes
        return self.order(tasks, cap)
