"""Check `PipelineTasks` and hand them to the native core as tuples; describe a deadlock (`stuck_grid`)."""

from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenload.errors import ConfigError
from evenload.types.pipeline import ActionColumns, PackBytes, PipelineTasks, SplitBackward
from evenload.types.timeline import KINDS

_SECONDS = tuple(field.name for field in fields(PipelineTasks) if field.name not in ("held", "split"))
_BYTES = tuple(field.name for field in fields(PackBytes))
_SPLIT = tuple(field.name for field in fields(SplitBackward))
_OF_STAGE_OR_RANK = ("stage_to_rank", "static_bytes")
_OF_PACK = ("p2p_forward_s", "p2p_backward_s", "forwards_needed")
_DTYPES = {
    name: np.dtype(np.float64 if name.endswith("_s") else np.int64 if name.endswith("_bytes") else np.int32)
    for name in (*_SECONDS, *_BYTES, *_SPLIT)
}


def task_arrays(tasks: PipelineTasks) -> tuple[NDArray[Any], ...]:
    """Return the columns of `tasks` and `tasks.held` in field order; `ConfigError` where a dtype, shape or memory order
    is not that of `PipelineTasks`. O(1)."""
    return _checked(tasks, "tasks", tasks, _SECONDS) + _checked(tasks, "tasks.held", tasks.held, _BYTES)


def split_arrays(tasks: PipelineTasks) -> tuple[NDArray[Any], ...] | None:
    """Return the columns of `tasks.split`, checked as by `task_arrays`; None where there is none."""
    return None if tasks.split is None else _checked(tasks, "tasks.split", tasks.split, _SPLIT)


def _checked(tasks: PipelineTasks, path: str, part: object, names: tuple[str, ...]) -> tuple[NDArray[Any], ...]:
    num_forward, num_backward, num_stages = tasks.num_forward, tasks.num_backward, tasks.num_stages
    arrays = tuple([getattr(part, name) for name in names])
    for name, array in zip(names, arrays, strict=True):
        shape: tuple[int, ...] = (num_forward if "forward_" in name else num_backward, num_stages)
        if name in _OF_PACK:
            shape = shape[:1]
        elif name in _OF_STAGE_OR_RANK:
            shape = (len(array),)
        if array.dtype != _DTYPES[name] or array.shape != shape or not array.flags.c_contiguous:
            raise ConfigError(
                f"{path}.{name} is {array.dtype}{list(array.shape)}, contiguous={array.flags.c_contiguous}; "
                f"expected contiguous {_DTYPES[name]}{list(shape)} (packs, stages)"
            )
    return arrays


_SHOWN_BEFORE, _SHOWN_AFTER = 4, 6


def stuck_grid(tasks: PipelineTasks, actions: ActionColumns, done: NDArray[np.int64]) -> str:
    """Describe a deadlock: every rank's next actions, stuck ones with what they wait for; `done` is how many actions
    each rank ran, int64[R]."""
    next_actions = actions.rank_offset[:-1] + done
    forwards_done = np.zeros((tasks.num_ranks, tasks.num_stages), np.int64)
    for rank, (lo, hi) in enumerate(zip(actions.rank_offset[:-1], next_actions, strict=True)):
        np.add.at(forwards_done[rank], actions.stage[lo:hi][actions.kind[lo:hi] == 0], 1)
    lines = [f"deadlock: {int(done.sum())} of {len(actions.kind)} actions ran"]
    for rank, at in enumerate(next_actions.tolist()):
        lo, hi = int(actions.rank_offset[rank]), int(actions.rank_offset[rank + 1])
        first, last = max(lo, at - _SHOWN_BEFORE), min(hi, at + 1 + _SHOWN_AFTER)
        names = [f"{actions.stage[i]}{KINDS[actions.kind[i]]}{actions.pack[i]}" for i in range(first, last)]
        if at < hi:
            names[at - first] += f" <-- waits for {_awaited(tasks, actions, at, forwards_done[rank])} "
        head = f"({first - lo} before) " if first > lo else ""
        tail = f" ({hi - last} more)" if last < hi else ""
        lines.append(f"rank {rank}: {head}{' '.join(names)}{tail}" + ("" if at < hi else " done"))
    return "\n".join(lines)


def _awaited(tasks: PipelineTasks, actions: ActionColumns, at: int, forwards_done: NDArray[np.int64]) -> str:
    """Return the action that the one at a place waits for; `forwards_done`, int64[P], are those of its rank."""
    kind, stage, pack = KINDS[actions.kind[at]], int(actions.stage[at]), int(actions.pack[at])
    if kind == "F":
        return f"{stage - 1}F{pack}"
    if kind == "W":
        return f"{stage}I{pack}"
    width, needed = int(tasks.widths[stage]), int(tasks.forwards_needed[pack])
    own = range(pack % width, needed, width)  # the forwards it needs that its rank runs
    if forwards_done[stage] < len(own):
        return f"{stage}F{own[-1]}"
    return f"{min(stage + 1, tasks.num_stages - 1)}B{pack}"
