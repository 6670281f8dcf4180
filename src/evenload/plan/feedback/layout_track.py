"""`LayoutTrack`: the Monitor of a run (FlexPipe §3.2): measured steps and switches in, what plans may know out.

Steps are planned ahead of their training (`data.prefetch_steps`), and plans already made are kept: what step n shows
decides from step n + 1 + steps_ahead on, always exactly that, whatever threads do. So what is known after the last
steps is kept until it has been used, and goes into checkpoints: a resumed run decides as this one would have.
"""

from collections.abc import Sequence

from evenload.plan.feedback.measured_layouts import MeasuredLayouts
from evenload.types.base import Frozen
from evenload.types.layout_decision import SwitchKind
from evenload.types.plan import StepPlan

WARM_UP_STEPS = 1
"""Steps in a layout that say nothing: at the start of a run and after every switch they pay for what is done once."""


class KnownAfter(Frozen):
    """What was known after a step."""

    step: int
    measured: MeasuredLayouts


class LayoutTrack:
    """Of one run; `note` is called by the thread that trains, `for_step` by the one that plans.

    Args:
        steps_ahead: of a step's training its plan may be made.
        known: of a checkpoint.
    """

    def __init__(self, steps_ahead: int, known: Sequence[KnownAfter] = ()) -> None:
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
        """Take a trained step into account. Every step, in order.

        Args:
            step_time_s: measured; of the first step in a layout, which says nothing, with the switch before it.
            switch: the kind of that switch and measured over predicted seconds; None = there was none, or no time was
                predicted.
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
        """With which a step is planned: what was known after the last step that must have been trained by then."""
        after = self._after
        known = [at for at in after if at <= step - 1 - self.steps_ahead]
        return after[max(known)] if known else MeasuredLayouts()

    def known(self) -> tuple[KnownAfter, ...]:
        """For a checkpoint."""
        return tuple(KnownAfter(step=step, measured=measured) for step, measured in sorted(self._after.items()))
