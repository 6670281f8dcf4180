"""`TimeSplit`: where the time of an optimizer step goes, by cause; the causes add up to the step time.

Every cause is device-seconds over all devices divided by the number of devices, so a second of one of eight devices
that wait is an eighth of a second here. The order is that of a stacked bar: useful work first, then what computing
costs on top of it, then waiting, then the end of the step.
"""

from collections.abc import Sequence

from evenload.types.base import Frozen

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
