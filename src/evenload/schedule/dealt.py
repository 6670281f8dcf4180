"""1F1B where stages have several ranks, to which their packs are dealt in turn (FlexPipe's part-pipeline parallelism).

Stage s has g[s] ranks and runs pack k on rank number k % g[s]. Every rank runs 1F1B over its own packs, so many
forwards ahead of its backwards that all later ranks have one each: w[s] = W[s] / g[s] of its own, where

    W[last] = 0        W[s] = W[s+1] + g[s+1], rounded up to a multiple of g[s]

Rounding from the end on matters: with 3 in place of 4 packs ahead on the first of 1 + 2 + 1 ranks, equal packs take
half as long again. With these:

    stage 0:         0F0 0F1 0F2 0F3 0F4 0B0 0F5 0B1 0F6 0B2 ...      w = 4
    stage 1, rank 0: 1F0     1F2         1B0     1F4     1B2 ...      w = 1
    stage 1, rank 1:     1F1     1F3             1B1     1F5 ...
    stage 2:         2F0 2B0 2F1 2B1 2F2 2B2 ...                      w = 0

Nothing deadlocks, whatever actions and transfers take. A rank of stage s runs B_j after F_(j + W[s]) and before
F_(j + W[s] + g[s]). Give F(k, s) the key (k, s) and B(j, s) the key (j + W[s] + 1/2, -s): every edge on a rank goes to
a larger key, F from stage to stage too, and so does B, because W falls from stage to stage. O(actions).

Instead of a list schedule with ranks as the resource: the order then depends on predicted durations, and with packs of
equal seconds, which `balanced` makes, it is this one.
"""

import numpy as np
from numpy.typing import NDArray

from evenload.errors import ConfigError
from evenload.types.pipeline import ActionColumns, PipelineTasks
from evenload.types.timeline import KINDS

_FORWARD, _BACKWARD = KINDS.index("F"), KINDS.index("B")


def dealt_one_f_one_b(tasks: PipelineTasks) -> ActionColumns:
    """The order of whole documents' packs.

    Raises:
        ConfigError: a backward pack needs another forward than its own.
    """
    count = tasks.num_forward
    if tasks.num_backward != count or (tasks.forwards_needed != np.arange(1, count + 1)).any():
        raise ConfigError(
            f"1f1b: stages have {tasks.widths.tolist()} ranks, so every backward pack has to be a forward pack, in the "
            "same order, of whole documents; use balanced or flexpipe, or one rank a stage"
        )
    warmup = dealt_warmup(tasks.widths).tolist()
    rows = []
    for stage, width in enumerate(tasks.widths.tolist()):
        for turn in range(width):
            own = np.arange(turn, count, width)
            kind, pack = _one_rank(own, warmup[stage])
            rows.append((kind, np.full(len(kind), stage), pack))
    return ActionColumns.of_ranks(rows)


def dealt_warmup(widths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Forwards that every rank of a stage runs before its first backward, on top of that one's; int64[P]."""
    ahead = np.zeros(len(widths), np.int64)  # W
    for stage in range(len(widths) - 2, -1, -1):
        packs = ahead[stage + 1] + widths[stage + 1]
        ahead[stage] = -(-packs // widths[stage]) * widths[stage]
    return ahead // widths


def _one_rank(own: NDArray[np.int64], warmup: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Kinds and packs of one rank in order: its i-th backward after i + 1 + warmup forwards, or all."""
    index = np.arange(len(own))
    kind = np.full(2 * len(own), _FORWARD)
    kind[index + np.minimum(len(own), index + 1 + warmup)] = _BACKWARD
    pack = np.empty(2 * len(own), np.int64)
    pack[kind == _FORWARD] = pack[kind == _BACKWARD] = own
    return kind, pack
