"""`StepFeedback`: what trained steps say to the plans of coming ones, of the speed of ranks and of layouts.

Where a run follows neither nothing happens here. Steps are noted on rank 0, where they are planned.
"""

from evenload.feed.step_maker import PlannedStep
from evenload.plan.feedback.layout_track import KnownAfter, LayoutTrack
from evenload.plan.feedback.speed_track import SpeedTrack
from evenload.plan.planner import StepPlanner
from evenload.plan.reconfiguration.flex_planner import FlexPlanner
from evenload.runtime.stages.live_stages import Switch
from evenload.runtime.stages.monitor import Monitor
from evenload.types.layout import ParallelLayout
from evenload.types.layout_decision import LayoutDecision
from evenload.types.rank_speeds import RankSpeeds
from evenload.types.timeline import Timeline


class StepFeedback:
    """Of one run.

    Args:
        layout: that runs now.
        follows_speeds: `plan.feedback`.
        steps_ahead: of a step's training its plan may be made.
        known: of layouts, from a checkpoint.
        last_step: behind the last one that is planned; None = until the data ends.
    """

    def __init__(
        self,
        planner: StepPlanner | FlexPlanner,
        layout: ParallelLayout,
        *,
        follows_speeds: bool,
        steps_ahead: int,
        known: tuple[KnownAfter, ...],
        last_step: int | None,
    ) -> None:
        self.speeds = SpeedTrack(layout, steps_ahead) if follows_speeds else None
        self._last_step, self._known = last_step, known
        is_flexible = isinstance(planner, FlexPlanner)
        self._monitor = Monitor(planner, layout, steps_ahead, known) if is_flexible else None

    @property
    def layouts(self) -> LayoutTrack | None:
        return None if self._monitor is None else self._monitor.track

    @property
    def known(self) -> tuple[KnownAfter, ...]:
        """Of layouts, for a checkpoint."""
        return self._known

    def new_speeds(self, planned: PlannedStep, measured: Timeline) -> tuple[RankSpeeds | None, int]:
        """Take a trained step into account: what is known of ranks from now on, and from which step on plans follow it;
        (None, 0) = nothing new, or no step is planned with it."""
        track = self.speeds
        if track is None or not track.note(planned.plan, measured):
            return None, 0
        from_step = planned.plan.step + 1 + track.steps_ahead
        return (track.speeds, from_step) if self._last_step is None or from_step < self._last_step else (None, 0)

    def decision(
        self, planned: PlannedStep, measured: Timeline, switch: Switch | None, peak_bytes: int | None
    ) -> LayoutDecision | None:
        """As `Monitor.note`; None where the layout cannot change."""
        if self._monitor is None:
            return None
        decision = self._monitor.note(planned, measured, switch, peak_bytes)
        self._known = self._monitor.known()
        return decision
