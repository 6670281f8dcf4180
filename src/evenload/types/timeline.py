"""Hold what ran when, as the simulator and the runtime both record it (`Timeline`), its file, the seconds of packs, and
where the time of a step goes (`TimeSplit`). What only a prediction knows is optional."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenload.errors import DataError
from evenload.types.base import Frozen
from evenload.types.document import Direction

KINDS = "FBIW"
"""Code of an action kind in `Timeline.kind` is its index here."""

SIDE_KINDS = (
    "recompute", "offload", "reload", "send_forward", "send_backward", "reduction", "optimizer", "gather",
    "weight_wait",
)  # fmt: skip
"""Code of a side task's kind in `SideTasks.kind` is its index here."""

MEMORY_KINDS = (
    "weights",
    "gradients",
    "optimizer_state",
    "activations_replay",
    "activations_recompute",
    "activations_offload",
    "keys_and_values",
    "key_value_gradients",
    "gathered_keys_and_values",
    "weight_gradient_inputs",
    "recompute_buffers",
    "offload_buffers",
    "layer_buffers",
    "head_logits",
)
"""What device memory holds, the order of the columns of `Timeline.memory_kind_bytes`: what stays for the
step, what lies between forward and backward (activations by policy; inputs and gradients that I leaves for W), and
buffers of the running action."""
_PREDICTED_KINDS = ("gathered_keys_and_values", "recompute_buffers", "layer_buffers", "head_logits")
COUNTED_KINDS = tuple(kind for kind in MEMORY_KINDS if kind not in _PREDICTED_KINDS)
"""What a run counts while it trains. The others are buffers of the running action, which only predictions know."""


@dataclass(frozen=True, eq=False, kw_only=True)
class SideTasks:
    """What happens beside the packs, as columns over n tasks: on a rank's copy stream and links, and after its packs.

        recompute          the front of a backward task: forward work repeated; inside of the task
        offload, reload    copies to and from host memory on the rank's copy stream, during a forward / backward task
        send_forward, send_backward    p2p transfers from the rank to `peer`
        reduction          reduce-scatters of gradients over replicas, unit by unit, beside packs and after them
        optimizer          the update, after the last reduction of all ranks
        gather             of updated weights: after the update, or beside the first packs those of the update before
                           the step, which may have begun before it (start_s below 0)
        weight_wait        a forward waits for weights that are on their way; inside of the task

    Args:
        dp_rank, rank: int32[n]; `rank` is the pipeline rank.
        kind: uint8[n], index into `SIDE_KINDS`.
        stage, pack: int32[n], of the task it belongs to, -1 = none; a reduction or a gather has the first stage of its
            rank.
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


def side_tasks(
    kind: str,
    dp_rank: int,
    rank: NDArray[np.integer],
    stage: NDArray[np.integer] | int,
    pack: NDArray[np.integer] | int,
    start_s: NDArray[np.float64] | float,
    end_s: NDArray[np.float64] | float,
    peer: NDArray[np.integer] | int = -1,
) -> SideTasks:
    """Of one kind and replica; a number stands for all of them."""
    count = len(rank)
    return SideTasks(
        dp_rank=np.full(count, dp_rank, np.int32),
        rank=rank.astype(np.int32),
        kind=np.full(count, SIDE_KINDS.index(kind), np.uint8),
        stage=np.full(count, stage, np.int32),
        pack=np.full(count, pack, np.int32),
        peer=np.full(count, peer, np.int32),
        start_s=np.full(count, start_s, np.float64),
        end_s=np.full(count, end_s, np.float64),
    )


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
        side: what happens beside the packs; None = not known.
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
        """The most bytes any rank held at any time; 0 without samples."""
        return int(self.memory_bytes.max()) if len(self.memory_bytes) else 0

    def bubble_fraction(self) -> float:
        """Share of all ranks' step time in which a rank computed no pack; ranks that only hold memory count too."""
        working = self.dp_rank.astype(np.int64) * 2**32 + self.rank
        holding = self.memory_dp_rank.astype(np.int64) * 2**32 + self.memory_rank
        num_ranks = len(np.union1d(working, holding))
        if not num_ranks or self.step_time_s <= 0:
            return 0.0
        return 1.0 - float((self.end_s - self.start_s).sum()) / (num_ranks * self.step_time_s)

    def reduction_seconds(self) -> tuple[float, float]:
        """Seconds in which gradients are summed, and of these while one of the ranks that hold the same layers has
        packs to compute; means over pipeline ranks. 0 where it is not known."""
        return self._beside_packs("reduction")

    def gather_seconds(self) -> tuple[float, float]:
        """Seconds in which updated weights are gathered, and of these as `reduction_seconds` those in which no forward
        waits for them: of the replica in which they wait longest. 0 where it is not known."""
        return self._beside_packs("gather")

    def _beside_packs(self, kind: str) -> tuple[float, float]:
        side, ranks = self.side, np.union1d(self.rank, self.memory_rank).tolist()
        if side is None or not ranks:
            return 0.0, 0.0
        of_kind, is_wait = (side.kind == SIDE_KINDS.index(name) for name in (kind, "weight_wait"))
        found = np.zeros((len(ranks), 2))
        for at, rank in enumerate(ranks):
            own = np.flatnonzero(of_kind & (side.rank == rank))
            if not len(own):
                continue
            # Replicas sum together: any of them stands for all.
            own = own[side.dp_rank[own] == side.dp_rank[own].min()]
            stage = side.stage[own[0]]
            twins = np.unique(side.rank[of_kind & (side.stage == stage)]) if stage >= 0 else [rank]
            packs_end_s = float(self.end_s[np.isin(self.rank, twins)].max(initial=0.0))
            start_s, end_s = side.start_s[own], side.end_s[own]
            hidden_s = (np.minimum(end_s, packs_end_s) - np.minimum(start_s, packs_end_s)).sum()
            if kind == "gather":
                waits = np.flatnonzero(is_wait & (side.rank == rank))
                waited_s = np.bincount(side.dp_rank[waits], side.end_s[waits] - side.start_s[waits])
                hidden_s = max(0.0, hidden_s - waited_s.max(initial=0.0))
            found[at] = (end_s - start_s).sum(), hidden_s
        total_s, hidden_s = found.mean(axis=0).tolist()
        return total_s, hidden_s


_SIDE = "side."
_OPTIONAL = ("is_critical", "memory_kind_bytes")
_ALWAYS = tuple(f.name for f in fields(Timeline) if f.name not in (*_OPTIONAL, "side"))


def write_timeline(path: Path | IO[bytes], timeline: Timeline) -> None:
    """Write all columns to a `.npz` file, or to an open one."""
    known = (*_ALWAYS, *(name for name in _OPTIONAL if getattr(timeline, name) is not None))
    columns: dict[str, Any] = {name: np.asarray(getattr(timeline, name)) for name in known}
    if timeline.side is not None:
        columns |= {_SIDE + f.name: getattr(timeline.side, f.name) for f in fields(SideTasks)}
    np.savez_compressed(path, **columns)


def read_timeline(path: Path | IO[bytes]) -> Timeline:
    """Inverse of `write_timeline`.

    Raises:
        DataError: not such a file.
    """
    try:
        with np.load(path) as columns:
            values: dict[str, Any] = {
                name: columns[name] for name in (*_ALWAYS, *(name for name in _OPTIONAL if name in columns))
            }
            side = None
            if _SIDE + "kind" in columns:
                side = SideTasks(**{f.name: columns[_SIDE + f.name] for f in fields(SideTasks)})
    except (OSError, KeyError, ValueError) as error:
        raise DataError(f"{path} is not a timeline file: {error}") from error
    values["step_time_s"] = float(values["step_time_s"])
    return Timeline(**values, side=side)


# Seconds of packs: a pipeline runs at the pace of its slowest pack, so a pack counts with its slowest stage, I and W of
# a backward added. Imbalance is the slowest pack over the mean pack of the same replica, of the worst replica; 1.0 is
# perfect. O(n log n) in tasks.


class PackSeconds(NamedTuple):
    """Packs of one direction, by ascending (dp rank, pack).

    Args:
        dp_rank, pack: int64[num_packs].
        seconds: float64[num_packs], on the pack's slowest stage.
    """

    dp_rank: NDArray[np.int64]
    pack: NDArray[np.int64]
    seconds: NDArray[np.float64]

    def imbalance(self) -> float:
        """Slowest over mean pack of a replica, of the worst replica; NaN without packs or without time."""
        worst = float("nan")
        for rank in np.unique(self.dp_rank):
            seconds = self.seconds[self.dp_rank == rank]
            if seconds.sum() > 0:
                worst = float(np.fmax(worst, seconds.max() / seconds.mean()))
        return worst


def pack_times(timeline: Timeline, direction: Direction) -> PackSeconds:
    """Seconds of the packs of one direction over all replicas."""
    # All kinds but F belong to backward packs.
    chosen = (timeline.kind == KINDS.index("F")) == (direction == "forward")
    seconds = (timeline.end_s - timeline.start_s)[chosen]
    keys = np.stack([timeline.dp_rank[chosen], timeline.pack[chosen], timeline.stage[chosen]]).astype(np.int64)
    stages, of_stage = np.unique(keys, axis=1, return_inverse=True)
    stage_seconds = np.bincount(of_stage.ravel(), weights=seconds, minlength=stages.shape[1])
    packs, of_pack = np.unique(stages[:2], axis=1, return_inverse=True)
    slowest = np.zeros(packs.shape[1])
    np.maximum.at(slowest, of_pack.ravel(), stage_seconds)
    return PackSeconds(dp_rank=packs[0], pack=packs[1], seconds=slowest)


def replica_ends(timeline: Timeline) -> dict[int, float]:
    """Seconds at which each replica's last task ends, by dp rank."""
    ranks = np.unique(timeline.dp_rank)
    return {int(rank): float(timeline.end_s[timeline.dp_rank == rank].max()) for rank in ranks}


def replica_imbalance(timeline: Timeline) -> float:
    """Latest over mean end of the replicas' pipelines; NaN without tasks."""
    ends = list(replica_ends(timeline).values())
    return max(ends) / (sum(ends) / len(ends)) if ends else float("nan")


# `TimeSplit`: where the time of an optimizer step goes, in device-seconds divided by the number of devices; causes add
# up to the step time. In the order of a stacked bar: useful work, what computing costs on top, waiting, the end of the
# step.

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
"""Names of the causes for tables and pictures, by field."""


class TimeSplit(Frozen):
    """Seconds by cause. All are at least 0, up to rounding.

    Args:
        useful_s: the lower bound: real tokens once, at full kernel speed, on all devices evenly.
        kernels_s: incomplete attention tiles, constants of packs and slices, keys and values read again by slices.
        padding_s: padding computed.
        recompute_s: forward work repeated in backward.
        offload_s: the part of copies to and from the host that no compute hides.
        tp_communication_s: exposed transfers inside tensor-parallel groups.
        cp_communication_s: exposed transfers of keys and values inside context-parallel groups (DP-Merge too).
        cp_imbalance_s: ranks of a context-parallel group that wait for its slowest (documents whole on one rank).
        warmup_s: pipeline ranks before their first action.
        cooldown_s: pipeline ranks after their last action, until their replica ends.
        imbalance_s: waiting in between because packs differ.
        stage_imbalance_s: waiting in between because stages differ (head, embedding, layers), were packs equal.
        dependency_s: waiting in between because of the order alone: equal actions would make the rank wait as well.
        p2p_s: waiting in between while only a transfer between stages was under way.
        dp_imbalance_s: replicas that wait for the slowest.
        reduction_s: gradients summed and weights spread over replicas, as far as nothing hides it.
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
        """(label, seconds) of every cause in order, also of those that cost nothing."""
        return tuple((CAUSE_LABELS[field], getattr(self, field)) for field in self.__struct_fields__)

    def total_s(self) -> float:
        """The step time."""
        return sum(seconds for _, seconds in self.parts())

    def losses(self) -> tuple[tuple[str, float], ...]:
        """(label, seconds) of everything but useful work, dearest first; equal ones in order."""
        return tuple(sorted(self.parts()[1:], key=lambda part: -part[1]))


def mean_time_split(splits: Sequence[TimeSplit]) -> TimeSplit:
    """Mean of each cause over steps; at least one."""
    return TimeSplit(
        **{field: sum(getattr(split, field) for split in splits) / len(splits) for field in TimeSplit.__struct_fields__}
    )
