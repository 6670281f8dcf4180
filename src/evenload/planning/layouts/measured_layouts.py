"""Correct predictions of layouts by trained steps and switches: ratios of measured to predicted seconds, and bytes.

The median of the last few ratios counts, so that one disturbed step says nothing. Layouts that never ran take what all
others have in common, and what is known of a layout fades towards that while it does not run.

`LayoutMonitor` is the Monitor of a run (FlexPipe §3.2). Steps are planned ahead of their training: what step n shows
decides from step n + 1 + steps_ahead on, always exactly that, whatever threads do. So what is known after the last
steps is kept until it has been used, and goes into checkpoints: a resumed run decides as this one would have.
"""

import statistics
from collections.abc import Sequence

import msgspec

from evenload.types.base import Frozen
from evenload.types.layout import ParallelLayout
from evenload.types.plan import StepPlan
from evenload.types.run import SwitchKind

KEPT_RATIOS = 5  # Newest of a layout, and of a kind of switch
FADE = 31 / 32  # Of what is special to a layout, left after every step that runs in another
# Steps in a layout that do not count: at the start of a run and after every switch they pay for what is done once.
WARM_UP_STEPS = 1


class LayoutRatios(Frozen):
    """Hold measured / predicted step times of the layouts of one shape, newest last, and its last measured step: what
    is wrong in a layout's price is rarely so because of where its stages are cut."""

    layout: ParallelLayout
    ratios: tuple[float, ...]
    last_step: int


class SwitchRatios(Frozen):
    """Hold measured / predicted seconds of switches of one kind, newest last."""

    kind: SwitchKind
    ratios: tuple[float, ...]


class MeasuredLayouts(Frozen):
    """Hold all ratios known at one step: of layouts and of kinds of switches in the order in which they first came, and
    of measured / predicted peak bytes of steps, newest last."""

    layouts: tuple[LayoutRatios, ...] = ()
    switches: tuple[SwitchRatios, ...] = ()
    memory_ratios: tuple[float, ...] = ()

    def with_step(self, step: int, layout: ParallelLayout, ratio: float) -> "MeasuredLayouts":
        key, kept = layout.shape, {one.layout: one for one in self.layouts}
        before = kept[key].ratios if key in kept else ()
        kept[key] = LayoutRatios(layout=key, ratios=(*before, ratio)[-KEPT_RATIOS:], last_step=step)
        return msgspec.structs.replace(self, layouts=tuple(kept.values()))

    def with_switch(self, kind: SwitchKind, ratio: float) -> "MeasuredLayouts":
        kept = {one.kind: one.ratios for one in self.switches}
        kept[kind] = (*kept.get(kind, ()), ratio)[-KEPT_RATIOS:]
        switches = tuple(SwitchRatios(kind=one, ratios=ratios) for one, ratios in kept.items())
        return msgspec.structs.replace(self, switches=switches)

    def with_peak(self, ratio: float) -> "MeasuredLayouts":
        return msgspec.structs.replace(self, memory_ratios=(*self.memory_ratios, ratio)[-KEPT_RATIOS:])

    def factor(self, layout: ParallelLayout, step: int) -> float:
        """Return the factor of predicted step times of a layout at a step; 1 while nothing is known."""
        if not self.layouts:
            return 1.0
        common = statistics.median(statistics.median(one.ratios) for one in self.layouts)
        key = layout.shape
        own = next((one for one in self.layouts if one.layout == key), None)
        if own is None:
            return common
        weight = FADE ** max(0, step - 1 - own.last_step)
        return common + (statistics.median(own.ratios) - common) * weight

    def switch_factor(self, kind: SwitchKind) -> float:
        """Return the factor of predicted seconds of a switch; 1 where none of its kind was made."""
        ratios = next((one.ratios for one in self.switches if one.kind == kind), ())
        return statistics.median(ratios) if ratios else 1.0

    def memory_factor(self) -> float:
        """Return the factor of predicted bytes, at least 1: memory that a measurement did not use stays reserved."""
        return max(1.0, statistics.median(self.memory_ratios)) if self.memory_ratios else 1.0


class MeasuredAfter(Frozen):
    """Hold what was known after a step."""

    step: int
    measured: MeasuredLayouts


class LayoutMonitor:
    """Track one run; `note` is called by the thread that trains, `for_step` by the one that plans, which is up to
    `steps_ahead` steps ahead of it; `known` is of a checkpoint."""

    def __init__(self, steps_ahead: int, known: Sequence[MeasuredAfter] = ()) -> None:
        self.steps_ahead = steps_ahead
        self._after = {one.step: one.measured for one in known}
        self._newest = known[-1].measured if known else MeasuredLayouts()
        self._generation: int | None = None
        self._steps_in_layout = 0

    def note(
        self,
        plan: StepPlan,
        step_time_s: float,
        switch: tuple[SwitchKind, float] | None = None,
        peak_bytes: int | None = None,
    ) -> None:
        """Record a trained step; every step, in order.

        Args:
            step_time_s: measured; of the first step in a layout, which does not count, with the switch before it.
            switch: kind, and measured over predicted seconds; None = there was none, or no time was predicted.
            peak_bytes: measured, of the fullest rank, where it is what `Prediction.peak_memory_bytes` predicts.
        """
        if plan.layout.generation != self._generation:
            self._generation, self._steps_in_layout = plan.layout.generation, 0
        self._steps_in_layout += 1
        if switch is not None:
            self._newest = self._newest.with_switch(*switch)
        if peak_bytes is not None and plan.predicted.peak_memory_bytes > 0:
            self._newest = self._newest.with_peak(peak_bytes / plan.predicted.peak_memory_bytes)
        predicted_s = plan.predicted.step_time_s
        if self._steps_in_layout > WARM_UP_STEPS and predicted_s > 0:
            self._newest = self._newest.with_step(plan.step, plan.layout, step_time_s / predicted_s)
        # A new dictionary, because the other thread may be reading the old one.
        oldest = plan.step - self.steps_ahead - 1
        self._after = {at: measured for at, measured in self._after.items() if at >= oldest} | {plan.step: self._newest}

    def for_step(self, step: int) -> MeasuredLayouts:
        """Return what was known after the last step that must have been trained when this step is planned."""
        after = self._after
        known = [at for at in after if at <= step - 1 - self.steps_ahead]
        return after[max(known)] if known else MeasuredLayouts()

    def known(self) -> tuple[MeasuredAfter, ...]:
        return tuple(MeasuredAfter(step=step, measured=measured) for step, measured in sorted(self._after.items()))
