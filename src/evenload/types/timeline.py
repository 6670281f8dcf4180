"""Hold what ran when, predicted or measured (`Timeline`), its file, the seconds of packs, and where the time of a step
goes (`TimeSplit`). What only a prediction knows is optional."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evenload.errors import DataError
from evenload.types.base import Frozen
from evenload.types.document import Direction

KINDS = "FBIW"
"""`Timeline.kind` is an index into it."""

SIDE_KINDS = (
    "recompute", "offload", "reload", "send_forward", "send_backward", "reduction", "optimizer", "gather",
    "weight_wait",
)  # fmt: skip
"""`SideTasks.kind` is an index into it."""

MEMORY_KINDS = (
    "weights",
    "gradients",
    "optimizer_state",
    "activations_replay",
    "activations_recompute",
    "activations_offload",
    "keys_and_values",
    "key_value_gradients",
    "states",
    "gathered_keys_and_values",
    "weight_gradient_inputs",
    "recompute_buffers",
    "offload_buffers",
    "layer_buffers",
    "head_logits",
)
"""Columns of `Timeline.memory_kind_bytes`: what stays for the step, what lies between forward and backward (activations
by policy; inputs and gradients that I leaves for W), and buffers of the running action."""
_PREDICTED_KINDS = ("gathered_keys_and_values", "recompute_buffers", "layer_buffers", "head_logits")
COUNTED_KINDS = tuple(kind for kind in MEMORY_KINDS if kind not in _PREDICTED_KINDS)
"""What a run counts; the others are buffers of the running action, which only predictions know."""


@dataclass(frozen=True, eq=False, kw_only=True)
class SideTasks:
    """What runs along with packs and after them, as columns over n tasks.

        recompute          forward work repeated, at the start of a backward task and inside it
        offload, reload    copies to and from host memory, during a forward / backward task
        send_forward, send_backward    p2p transfers from the rank to `peer`
        reduction          reduce-scatters of gradients over replicas, unit by unit, during packs and after them
        optimizer          the update, after the last reduction of all ranks
        gather             all-gathers of updated weights: after the update, or those of the update before the step,
                           during its first packs; they may begin before the step (start_s below 0)
        weight_wait        a forward waits for a gather; inside the task

    Args:
        dp_rank, rank: int32[n]; `rank` is the pipeline rank.
        kind: uint8[n], index into `SIDE_KINDS`.
        stage, pack: int32[n], of its task, -1 = none; a reduction or a gather has the first stage of its rank.
        peer: int32[n], the receiving pipeline rank of a p2p transfer, else -1.
        start_s, end_s: float64[n].
    """

    dp_rank: NDArray[np.int32]
    rank: NDArray[np.int32]
    kind: NDArray[np.uint8]
    stage: NDArray[np.int32]
    pack: NDArray[np.int32]
    peer: NDArray[np.int32]
    start_s: NDArray[np.float64]
    end_s: NDArray[np.float64]


def joined(parts: Sequence[Any], names: Iterable[str]) -> dict[str, Any]:
    """Concatenate, name by name, columns that all parts have as attributes."""
    return {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}


def side_tasks(
    kind: str,
    dp_rank: int,
    rank: NDArray[np.integer],
    stage: ArrayLike,
    pack: ArrayLike,
    start_s: ArrayLike,
    end_s: ArrayLike,
    peer: ArrayLike = -1,
) -> SideTasks:
    """Make tasks of one kind and replica, as many as `rank` has entries; a number stands for all of them."""
    whole = {"dp_rank": dp_rank, "rank": rank, "stage": stage, "pack": pack, "peer": peer}
    columns: dict[str, Any] = {name: np.full(len(rank), value, np.int32) for name, value in whole.items()}
    columns |= {name: np.full(len(rank), s, np.float64) for name, s in (("start_s", start_s), ("end_s", end_s))}
    return SideTasks(kind=np.full(len(rank), SIDE_KINDS.index(kind), np.uint8), **columns)


@dataclass(frozen=True, eq=False, kw_only=True)
class Timeline:
    """Columns over tasks, and byte samples over time. Times start at 0 with the step.

    Args:
        dp_rank, rank, stage, pack: int32[num_tasks]; `rank` is the pipeline rank.
        kind: uint8[num_tasks], index into `KINDS`.
        start_s, end_s: float64[num_tasks].
        step_time_s: from the first start to the optimizer step's end.
        memory_dp_rank, memory_rank: int32[num_samples].
        memory_time_s: float64[num_samples]; ascending for each rank.
        memory_bytes: int64[num_samples], bytes held from that time on.
        is_critical: bool[num_tasks], on the critical path of its replica; None = not known.
        side: what runs along with the packs; None = not known.
        memory_kind_bytes: int64[num_samples, len(MEMORY_KINDS)], adds up to `memory_bytes`; None = not known.
    """

    dp_rank: NDArray[np.int32]
    rank: NDArray[np.int32]
    stage: NDArray[np.int32]
    kind: NDArray[np.uint8]
    pack: NDArray[np.int32]
    start_s: NDArray[np.float64]
    end_s: NDArray[np.float64]
    step_time_s: float
    memory_dp_rank: NDArray[np.int32]
    memory_rank: NDArray[np.int32]
    memory_time_s: NDArray[np.float64]
    memory_bytes: NDArray[np.int64]
    is_critical: NDArray[np.bool_] | None = None
    side: SideTasks | None = None
    memory_kind_bytes: NDArray[np.int64] | None = None

    @property
    def num_tasks(self) -> int:
        """Rows of the task columns."""
        return len(self.start_s)

    def peak_bytes(self) -> int:
        """Return the most bytes any rank held at any time; 0 without samples."""
        return int(self.memory_bytes.max()) if len(self.memory_bytes) else 0

    def bubble_fraction(self) -> float:
        """Return the share of all ranks' step time in which a rank computed no pack; idle ranks count too."""
        working = self.dp_rank.astype(np.int64) * 2**32 + self.rank
        holding = self.memory_dp_rank.astype(np.int64) * 2**32 + self.memory_rank
        num_ranks = len(np.union1d(working, holding))
        if not num_ranks or self.step_time_s <= 0:
            return 0.0
        return 1.0 - float((self.end_s - self.start_s).sum()) / (num_ranks * self.step_time_s)

    def reduction_seconds(self) -> tuple[float, float]:
        """Return the seconds of reduce-scatters, and of them those before the last pack of the ranks with the same
        layers ends; means over pipeline ranks, 0 where not known."""
        return self._overlapped_seconds("reduction")

    def gather_seconds(self) -> tuple[float, float]:
        """Return the same of all-gathers of weights, without the time in which forwards wait for them, of the replica
        where that is longest."""
        return self._overlapped_seconds("gather")

    def _overlapped_seconds(self, kind: str) -> tuple[float, float]:
        side, ranks = self.side, np.union1d(self.rank, self.memory_rank).tolist()
        if side is None or not ranks:
            return 0.0, 0.0
        of_kind, is_wait = (side.kind == SIDE_KINDS.index(name) for name in (kind, "weight_wait"))
        seconds = np.zeros((len(ranks), 2))
        for at, rank in enumerate(ranks):
            own = np.flatnonzero(of_kind & (side.rank == rank))
            if not len(own):
                continue
            own = own[side.dp_rank[own] == side.dp_rank[own].min()]  # the same in all replicas
            stage = side.stage[own[0]]
            twins = np.unique(side.rank[of_kind & (side.stage == stage)]) if stage >= 0 else [rank]
            packs_end_s = float(self.end_s[np.isin(self.rank, twins)].max(initial=0.0))
            start_s, end_s = side.start_s[own], side.end_s[own]
            hidden_s = (np.minimum(end_s, packs_end_s) - np.minimum(start_s, packs_end_s)).sum()
            if kind == "gather":
                waits = np.flatnonzero(is_wait & (side.rank == rank))
                waited_s = np.bincount(side.dp_rank[waits], side.end_s[waits] - side.start_s[waits])
                hidden_s = max(0.0, hidden_s - waited_s.max(initial=0.0))
            seconds[at] = (end_s - start_s).sum(), hidden_s
        total_s, hidden_s = seconds.mean(axis=0).tolist()
        return total_s, hidden_s


_SIDE = "side."
_OPTIONAL = ("is_critical", "memory_kind_bytes")
_ALWAYS = tuple(f.name for f in fields(Timeline) if f.name not in (*_OPTIONAL, "side"))


def write_timeline(path: Path | IO[bytes], timeline: Timeline) -> None:
    """Write all columns to a `.npz` file, by path or open."""
    values = {name: getattr(timeline, name) for name in (*_ALWAYS, *_OPTIONAL)}
    columns: dict[str, Any] = {name: np.asarray(value) for name, value in values.items() if value is not None}
    if timeline.side is not None:
        columns |= {_SIDE + f.name: getattr(timeline.side, f.name) for f in fields(SideTasks)}
    np.savez_compressed(path, **columns)


def read_timeline(path: Path | IO[bytes]) -> Timeline:
    """Read what `write_timeline` wrote; `DataError` where it is no such file."""
    try:
        with np.load(path) as columns:
            names = (*_ALWAYS, *(name for name in _OPTIONAL if name in columns))
            values: dict[str, Any] = {name: columns[name] for name in names}
            side = None
            if _SIDE + "kind" in columns:
                side = SideTasks(**{f.name: columns[_SIDE + f.name] for f in fields(SideTasks)})
    except (OSError, KeyError, ValueError) as error:
        raise DataError(f"{path} is not a timeline file: {error}") from error
    values["step_time_s"] = float(values["step_time_s"])
    return Timeline(**values, side=side)


class PackSeconds(NamedTuple):
    """Packs of one direction, by ascending (dp rank, pack).

    Args:
        dp_rank, pack: int64[num_packs].
        seconds: float64[num_packs], on the pack's slowest stage, which sets the pace; I and W of a backward added.
    """

    dp_rank: NDArray[np.int64]
    pack: NDArray[np.int64]
    seconds: NDArray[np.float64]

    def imbalance(self) -> float:
        """Return slowest over mean pack of the worst replica; 1.0 is perfect, NaN without packs or without time."""
        worst = float("nan")
        for rank in np.unique(self.dp_rank):
            seconds = self.seconds[self.dp_rank == rank]
            if seconds.sum() > 0:
                worst = float(np.fmax(worst, seconds.max() / seconds.mean()))
        return worst


def pack_times(timeline: Timeline, direction: Direction) -> PackSeconds:
    """Return the seconds of the packs of one direction over all replicas. O(n log n) in tasks."""
    chosen = (timeline.kind == KINDS.index("F")) == (direction == "forward")  # all other kinds are of backward packs
    seconds = (timeline.end_s - timeline.start_s)[chosen]
    keys = np.stack([timeline.dp_rank[chosen], timeline.pack[chosen], timeline.stage[chosen]]).astype(np.int64)
    stages, of_stage = np.unique(keys, axis=1, return_inverse=True)
    stage_seconds = np.bincount(of_stage.ravel(), weights=seconds, minlength=stages.shape[1])
    packs, of_pack = np.unique(stages[:2], axis=1, return_inverse=True)
    slowest = np.zeros(packs.shape[1])
    np.maximum.at(slowest, of_pack.ravel(), stage_seconds)
    return PackSeconds(dp_rank=packs[0], pack=packs[1], seconds=slowest)


def replica_imbalance(timeline: Timeline) -> float:
    """Return latest over mean end of the replicas' pipelines; NaN without tasks."""
    ends = [float(timeline.end_s[timeline.dp_rank == rank].max()) for rank in np.unique(timeline.dp_rank)]
    return max(ends) / (sum(ends) / len(ends)) if ends else float("nan")


CAUSE_LABELS = {
    "useful_s": "useful work",
    "kernels_s": "small packs and slices",
    "padding_s": "padding",
    "recompute_s": "recompute",
    "offload_s": "offload",
    "tp_communication_s": "tp transfers",
    "cp_communication_s": "cp transfers",
    "cp_imbalance_s": "cp imbalance",
    "warmup_s": "pipeline warm-up",
    "cooldown_s": "pipeline cool-down",
    "imbalance_s": "pack imbalance",
    "stage_imbalance_s": "stage imbalance",
    "dependency_s": "dependency",
    "p2p_s": "transfers between stages",
    "dp_imbalance_s": "dp imbalance",
    "reduction_s": "gradient reduction",
    "optimizer_s": "optimizer",
    "switch_s": "switch of layout",
}
"""Names of the causes of `TimeSplit` for tables of numbers."""

CAUSE_GROUPS = {
    "useful work": ("useful_s",),
    "extra compute": ("kernels_s", "padding_s", "recompute_s"),
    "transfers": ("offload_s", "tp_communication_s", "cp_communication_s", "p2p_s", "switch_s"),
    "pipeline bubble": ("warmup_s", "cooldown_s", "dependency_s"),
    "uneven packs": ("imbalance_s", "stage_imbalance_s", "cp_imbalance_s"),
    "uneven replicas": ("dp_imbalance_s",),
    "gradients and update": ("reduction_s", "optimizer_s"),
}
"""Causes of `TimeSplit` in the groups that pictures show, useful work and six losses."""


class TimeSplit(Frozen):
    """Device-seconds of an optimizer step by cause, over the number of devices; they add up to the step time, none is
    negative, up to rounding. In the order of a stacked bar.

    Args:
        useful_s: the lower bound: real tokens once, at full kernel speed, on all devices evenly.
        kernels_s: incomplete attention tiles, constants of packs and slices, keys and values read again by slices.
        padding_s: padding computed.
        recompute_s: forward work repeated in backward.
        offload_s: copies to and from the host that no compute hides.
        tp_communication_s: exposed transfers inside tensor-parallel groups.
        cp_communication_s: exposed transfers of keys and values inside context-parallel groups (DP-Merge too).
        cp_imbalance_s: waiting for the slowest rank of a context-parallel group (documents whole on one rank).
        warmup_s: pipeline ranks before their first action.
        cooldown_s: pipeline ranks after their last action, until their replica ends.
        imbalance_s: waiting in between because packs differ.
        stage_imbalance_s: waiting in between because stages differ (head, embedding, layers), were packs equal.
        dependency_s: waiting in between because of the order alone, with equal actions too.
        p2p_s: waiting in between while only a transfer between stages was under way.
        dp_imbalance_s: waiting for the slowest replica.
        reduction_s: exposed reduce-scatters of gradients and all-gathers of weights.
        optimizer_s: the update.
        switch_s: weights and optimizer state that move to other devices before the step (`flexpipe`).
    """

    useful_s: float
    kernels_s: float
    padding_s: float
    recompute_s: float
    offload_s: float
    tp_communication_s: float
    cp_communication_s: float
    cp_imbalance_s: float
    warmup_s: float
    cooldown_s: float
    imbalance_s: float
    stage_imbalance_s: float
    dependency_s: float
    p2p_s: float
    dp_imbalance_s: float
    reduction_s: float
    optimizer_s: float
    switch_s: float = 0.0

    def parts(self) -> tuple[tuple[str, float], ...]:
        """Return (label, seconds) of every cause in order."""
        return tuple((CAUSE_LABELS[field], getattr(self, field)) for field in self.__struct_fields__)

    def groups(self) -> dict[str, float]:
        """Return the seconds of every group of causes in order."""
        return {label: sum(getattr(self, field) for field in group) for label, group in CAUSE_GROUPS.items()}

    def total_s(self) -> float:
        """Return the step time."""
        return sum(seconds for _, seconds in self.parts())


def mean_time_split(splits: Sequence[TimeSplit]) -> TimeSplit:
    """Return the mean of each cause over at least one step."""
    return TimeSplit(
        **{field: sum(getattr(split, field) for split in splits) / len(splits) for field in TimeSplit.__struct_fields__}
    )
