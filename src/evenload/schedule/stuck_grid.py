"""The picture in a deadlock message: every rank's next actions, the stuck ones marked with what they await.

rank 0: 0F0 0B0 <-- waits for 1B0  0F1 0B1
rank 1: 1F1 <-- waits for 0F1  1B1 1F0 1B0
"""

from collections.abc import Sequence

from evenload.types.pipeline import ActionColumns
from evenload.types.timeline import KINDS

_SHOWN_BEFORE, _SHOWN_AFTER = 4, 6


def stuck_grid(actions: ActionColumns, done: Sequence[int], awaited: Sequence[str]) -> str:
    """One line a rank.

    Args:
        done: per rank, how many of its actions ran.
        awaited: per rank, what its next action waits for; "" when it has none left.
    """
    lines = []
    for rank, (count, what) in enumerate(zip(done, awaited, strict=True)):
        lo, hi = int(actions.rank_offset[rank]), int(actions.rank_offset[rank + 1])
        at = lo + count
        first, last = max(lo, at - _SHOWN_BEFORE), min(hi, at + 1 + _SHOWN_AFTER)
        names = [f"{actions.stage[i]}{KINDS[actions.kind[i]]}{actions.pack[i]}" for i in range(first, last)]
        if at < hi:
            names[at - first] += f" <-- waits for {what} "
        head = f"({first - lo} before) " if first > lo else ""
        tail = f" ({hi - last} more)" if last < hi else ""
        lines.append(f"rank {rank}: {head}{' '.join(names)}{tail}" + ("" if at < hi else " done"))
    return "\n".join(lines)


def awaited_input(
    kind: int, stage: int, pack: int, *, num_stages: int, forwards_done: int, forwards_needed: int
) -> str:
    """What an action of a stage waits for, as an action name; I stands for B of the stage after.

    Args:
        forwards_done: forwards that ran on the same stage; forwards_needed: D of the backward pack.
    """
    if KINDS[kind] == "F":
        return f"{stage - 1}F{pack}"
    if KINDS[kind] == "W":
        return f"{stage}I{pack}"
    if forwards_done < forwards_needed:
        return f"{stage}F{forwards_needed - 1}"
    return f"{min(stage + 1, num_stages - 1)}B{pack}"
