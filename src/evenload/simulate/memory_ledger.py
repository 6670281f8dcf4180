"""`memory_ledger`: what every rank holds over time, by kind, event by event. O(actions · kinds).

The rules are the simulator's. A rank holds its static bytes from the start. When a forward starts, what it keeps and
its buffers come on top; when it ends, the buffers go. When a backward starts, its buffers come (with them what it
leaves behind: gradients of keys and values, inputs for W); when it ends, they go, and with them what it gives back.
Nothing else moves bytes, so a rank's samples, two an action, are all there is; kinds add up to the simulator's total
at every sample, and the largest total is its peak.
"""

import numpy as np
from numpy.typing import NDArray

from evenload.cost.memory_kinds import KindBytes
from evenload.types.pipeline import ActionColumns, PackBytes, SplitBackward


def memory_ledger(kinds: KindBytes, actions: ActionColumns) -> NDArray[np.int64]:
    """Bytes of every kind at every memory sample of `simulate.timeline.to_timeline`; int64[num_samples, K].

    Samples of a rank: one at the start of the step, then one at the start and one at the end of each of its actions.
    """
    kept, freed, temporary = action_bytes(kinds.held, None if kinds.input_freed_bytes is None else kinds, actions)
    samples = []
    for rank in range(actions.num_ranks):
        own = slice(int(actions.rank_offset[rank]), int(actions.rank_offset[rank + 1]))
        static = kinds.held.static_bytes[rank]
        after = static + np.cumsum(kept[own] - freed[own], axis=0)
        running = after + freed[own] + temporary[own]
        of_actions = np.stack([running, after], axis=1).reshape(-1, len(static))
        samples.append(np.concatenate([static[None], of_actions]))
    return np.concatenate(samples)


def action_bytes(
    held: PackBytes, split: SplitBackward | KindBytes | None, actions: ActionColumns
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """(kept, freed, temporary) bytes of every action; int64[n, ...] each, with the trailing axes of the columns."""
    kept, freed, temporary = np.zeros((3, len(actions.kind), *held.static_bytes.shape[1:]), np.int64)
    moved: list[tuple[int, NDArray[np.int64], NDArray[np.int64] | None]] = [
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
        assert column is not None, "a split has all its columns"
        into[at] = column[actions.pack[at], actions.stage[at]]
    return kept, freed, temporary
