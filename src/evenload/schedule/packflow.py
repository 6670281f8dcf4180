"""PackFlow (SlimPack §4.2): pipeline schedules for packs that differ between forward and backward.

`packflow_word` is the static schedule of the paper: 1F1B with, on demand, injected forwards. `packflow_list`
is ours: the same pack orders, but each stage decides in simulated time, within a memory cap. It beats the
word by 5-15 % in simulation and loses at most 0.4 % under 10 % duration noise where the word loses 5-18 %.
Neither can deadlock (DESIGN §7).
"""

import numpy as np
from numpy.typing import NDArray

from evenload import _native
from evenload.errors import ConfigError
from evenload.schedule.forward_counts import catch_up_counts, keep_counts
from evenload.schedule.list_schedule import list_schedule
from evenload.schedule.static_word import static_word
from evenload.schedule.task_arrays import check_values, split_arrays, task_arrays
from evenload.types.backend import Backend
from evenload.types.pipeline import ActionColumns, PipelineTasks

_UNLIMITED = 2**31 - 1


def packflow_word(tasks: PipelineTasks, *, inject: bool, warmup_scale: int = 1) -> ActionColumns:
    """The static PackFlow order: stage s runs B_j after `min(m_f, f[j] + warmup_scale (P - 1 - s))` forwards.

    Args:
        inject: at least one new forward per backward (SlimPack Fig. 9), at the price of its memory;
            otherwise backwards catch up as early as they can.
        warmup_scale: 1 is 1F1B's; 3 removes the wait of catching up after a long document.

    Raises:
        ConfigError: `warmup_scale` below 0.
    """
    counts = keep_counts(tasks.forwards_needed, tasks.num_forward) if inject else catch_up_counts(tasks.forwards_needed)
    warmup = warmup_scale * np.arange(tasks.num_stages - 1, -1, -1, dtype=np.int64)
    return static_word(tasks, counts, warmup)


def packflow_list(
    tasks: PipelineTasks,
    *,
    cap_bytes: NDArray[np.int64],
    alternate: bool = False,
    lookahead: int | None = None,
    split: bool = False,
    backend: Backend = "native",
) -> ActionColumns:
    """Event-driven list schedule under a memory cap; the rules stand in `schedule/list_schedule.py`.

    With one stage a rank the peak is at most max(cap, what any schedule of these pack orders must hold).
    The cap is therefore a wish: compare `simulate(...).peak_bytes` with the device.

    Args:
        cap_bytes: int64[R], static bytes included; below the need it is exceeded as little as possible.
        alternate: after a backward prefer a forward (holds less for uniform packs), else always backward.
        lookahead: packs a stage may run ahead of the 1F1B word; None = limited by memory only.
        split: run backwards as I and later W (zero bubble) wherever memory allows.

    Raises:
        ConfigError, ValueError: `split` without split columns, columns or values out of range, or a forward pack
            that no backward needs.
    """
    arrays = task_arrays(tasks)
    caps = np.ascontiguousarray(cap_bytes, dtype=np.int64)
    if caps.shape != (tasks.num_ranks,):
        raise ConfigError(f"packflow_list: cap_bytes has shape {caps.shape} for {tasks.num_ranks} ranks")
    ahead = _UNLIMITED if lookahead is None else lookahead
    if not 0 <= ahead <= _UNLIMITED:
        raise ConfigError(f"packflow_list: lookahead is {lookahead}, must be at least 0 (None = no limit)")
    if split and tasks.split is None:
        raise ConfigError("packflow_list: split backwards asked for, but the tasks have no split columns")
    if backend == "native":
        columns = split_arrays(tasks) if split else None
        return ActionColumns(*_native.list_schedule(arrays, caps, alternate, ahead, columns))
    check_values(tasks)
    return list_schedule(tasks, caps.tolist(), alternate=alternate, lookahead=ahead, split=split)
