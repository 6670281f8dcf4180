"""`memory_ledger`: what every rank holds over time, event by event, in all or by kind. O(actions · kinds).

The rules are the simulator's. A rank holds its static bytes from the start. When a forward starts, what it keeps and
its buffers come on top; when it ends, the buffers go. When a backward starts, its buffers come (with them what it
leaves behind: gradients of keys and values, inputs for W); when it ends, they go, and with them what it gives back.
Nothing else moves bytes, so a rank's samples, two an action, are all there is; kinds add up to the simulator's total
at every sample, and the largest total is its peak.
"""

import numpy as np
from numpy.typing import NDArray

from evenload.types.pipeline import ActionColumns, PipelineTasks


def memory_ledger(tasks: PipelineTasks, actions: ActionColumns) -> NDArray[np.int64]:
    """Bytes that ranks hold; int64[num_samples], or int64[num_samples, K] of the tasks of `cost.memory_kinds`.

    Samples of a rank: one at the start of the step, then one at the start and one at the end of each of its actions.
    """
    held, split = tasks.held, tasks.split
    kept, freed, temporary = np.zeros((3, len(actions.kind), *held.static_bytes.shape[1:]), np.int64)
    moved = [
        (0, kept, held.forward_kept_bytes),
        (0, temporary, held.forward_temp_bytes),
        (1, freed, held.backward_freed_bytes),
        (1, temporary, held.backward_temp_bytes),
    ]
    if split is not None:
        moved += [
            (2, freed, split.input_freed_bytes),
            (2, temporary, split.input_temp_bytes),
            (3, freed, split.weight_freed_bytes),
        ]
    for kind, into, column in moved:
        at = np.flatnonzero(actions.kind == kind)
        into[at] = column[actions.pack[at], actions.stage[at]]
    samples = []
    for rank, static in enumerate(held.static_bytes):
        own = actions.of_rank(rank)
        after = static + np.cumsum(kept[own] - freed[own], axis=0)
        running = after + freed[own] + temporary[own]
        samples += [static[None], np.stack([running, after], axis=1).reshape(-1, *static.shape)]
    return np.concatenate(samples)
