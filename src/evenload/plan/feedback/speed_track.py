"""`SpeedTrack`: from the factors of the steps trained so far to the speeds that coming steps are planned with.

    factors of a step ─► median of the last steps ─► smoothed ─► beyond the dead band? ─► RankSpeeds

The median keeps a step in which the machine did something else from counting at all, smoothing halves what is left of
noise, and within the dead band nothing changes, so that plans do not follow noise. A rank that becomes 30 % slower
shows after its second step and is known to 3 % after the fourth.

Steps are planned `steps_ahead` before they are trained, and plans already made are kept: what step n shows decides from
step n + 1 + steps_ahead on. Always exactly that, whatever threads do: the speeds of a step are those after one certain
step, so a recorded run of the same measurements plans the same.
"""

import numpy as np
from numpy.typing import NDArray

from evenload.plan.feedback.measured_factors import measured_factors
from evenload.types.layout import ParallelLayout
from evenload.types.plan import StepPlan
from evenload.types.rank_speeds import RankSpeeds
from evenload.types.timeline import Timeline

WARM_UP_STEPS = 1
"""Steps at the start that say nothing: they pay for what is done once."""
MEDIAN_STEPS = 3
"""Steps of which the median counts."""
SMOOTHING = 0.5
"""Weight of the newest median."""
DEAD_BAND = 0.03
"""Changes of a rank's factor below this share do nothing, and ranks so close to each other count as equal."""


class SpeedTrack:
    """Of one run; `note` is called by the thread that trains, `for_step` by the one that plans.

    Args:
        steps_ahead: of a step's training its plan may be made.
    """

    def __init__(self, layout: ParallelLayout, steps_ahead: int) -> None:
        self.steps_ahead = steps_ahead
        self.speeds: RankSpeeds | None = None
        self._noted = 0
        self._recent: list[NDArray[np.float64]] = []
        self._smoothed = np.full((layout.dp, layout.pp), np.nan)
        self._after_step: dict[int, RankSpeeds | None] = {}
        self._first: int | None = None

    def note(self, plan: StepPlan, measured: Timeline) -> bool:
        """Take a trained step into account; whether the speeds of coming steps change. Every step, in order."""
        self._noted += 1
        changed = self._noted > WARM_UP_STEPS and self._update(measured_factors(plan, measured))
        self._after_step[plan.step] = self.speeds
        self._after_step.pop(plan.step - self.steps_ahead - 2, None)
        if self._first is None:
            self._first = plan.step
        return changed

    def for_step(self, step: int) -> RankSpeeds | None:
        """With which a step is planned: what was known after the last step that must have been trained by then."""
        known = step - 1 - self.steps_ahead
        if self._first is None or known < self._first:
            return None
        return self._after_step[known]

    def _update(self, factors: NDArray[np.float64]) -> bool:
        self._recent = [*self._recent, factors][-MEDIAN_STEPS:]
        newest = _median(np.stack(self._recent))
        mixed = SMOOTHING * newest + (1 - SMOOTHING) * self._smoothed
        # A rank's first value counts in full; one without a value keeps what is known.
        self._smoothed = np.where(np.isnan(self._smoothed), newest, np.where(np.isnan(newest), self._smoothed, mixed))
        wanted = speeds_of(self._smoothed)
        if not _differ(wanted, self.speeds):
            return False
        self.speeds = wanted
        return True


def speeds_of(factors: NDArray[np.float64]) -> RankSpeeds:
    """Factors as common drift and relative slowness; ranks within the dead band of the drift are equal to it.

    Args:
        factors: float64[dp, pp]; NaN = not known, taken for the drift.
    """
    known = np.sort(factors[~np.isnan(factors)])
    drift = float(known[(len(known) - 1) // 2]) if len(known) else 1.0
    slowness = factors / drift
    slowness = np.where(np.isnan(slowness) | (np.abs(slowness - 1.0) <= DEAD_BAND), 1.0, slowness)
    return RankSpeeds(slowness=tuple(map(tuple, slowness.tolist())), drift=drift)


def _differ(wanted: RankSpeeds, used: RankSpeeds | None) -> bool:
    """By more than the dead band, on any rank."""
    return any(
        abs(new / old - 1.0) > DEAD_BAND
        for dp_rank in range(len(wanted.slowness))
        for new, old in zip(
            wanted.factors(dp_rank),
            used.factors(dp_rank) if used else (1.0,) * len(wanted.slowness[0]),
            strict=True,
        )
    )


def _median(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Over the first axis, of what is known; NaN where nothing is. Of two values the smaller."""
    ordered = np.sort(values, axis=0)  # NaN last
    known = (~np.isnan(values)).sum(axis=0)
    middle = np.maximum(known - 1, 0) // 2
    return np.take_along_axis(ordered, middle[None], axis=0)[0]
