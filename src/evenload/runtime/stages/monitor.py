"""`Monitor`: what a run whose layout may change tells its planner, and what it says of every decision (FlexPipe §3.2).

Measured step times, switches and memory go into a `LayoutTrack`, on rank 0, where steps are planned. What is told of a
step is the decision that came with its plan, and what the switch before it took.
"""

from collections.abc import Sequence

import msgspec

from evenload.feed.step_maker import PlannedStep
from evenload.plan.feedback.layout_track import KnownAfter, LayoutTrack
from evenload.plan.reconfiguration.flex_planner import FlexPlanner
from evenload.runtime.stages.live_stages import Switch
from evenload.types.layout import ParallelLayout
from evenload.types.layout_decision import LayoutDecision, switch_kind
from evenload.types.timeline import Timeline


class Monitor:
    """Of one run.

    Args:
        planner: that decides.
        start: the layout that runs now.
        steps_ahead: of a step's training its plan may be made.
        known: of a checkpoint.
    """

    def __init__(
        self, planner: FlexPlanner, start: ParallelLayout, steps_ahead: int, known: Sequence[KnownAfter]
    ) -> None:
        self._planner, self._layout = planner, start
        self.track = LayoutTrack(steps_ahead, known) if planner.options.follow_measured else None

    def known(self) -> tuple[KnownAfter, ...]:
        """For a checkpoint."""
        return () if self.track is None else self.track.known()

    def note(
        self, planned: PlannedStep, measured: Timeline, switch: Switch | None, peak_bytes: int | None
    ) -> LayoutDecision | None:
        """Take a trained step into account; its decision, with what was measured of it. Every step, in order.

        Args:
            switch: before the step; None = there was none.
            peak_bytes: measured, of the fullest rank; None where what is counted is not what is predicted (on a CPU,
                without temporary buffers). That of a step with a switch is not used: it has both layouts' state.
        """
        plan, decision, told = planned.plan, planned.decision, None
        if switch is not None:
            moved_bytes, taken_s = switch.weight_bytes + switch.state_bytes, switch.stall_s + switch.wait_s
            predicted_s = self._planner.switch_seconds(self._layout, plan)
            if predicted_s > 0:
                told = switch_kind(self._layout, plan.layout), taken_s / predicted_s
            # Processes that resume go from the layout in which they start to that of the checkpoint, undecided.
            if decision is not None and decision.before == switch.before:
                decision = msgspec.structs.replace(decision, measured_switch_s=taken_s, moved_bytes=moved_bytes)
        self._layout = plan.layout
        if self.track is not None:
            self.track.note(plan, measured.step_time_s, told, peak_bytes if switch is None else None)
        return decision
