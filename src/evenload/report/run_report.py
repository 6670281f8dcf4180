"""`RunReport`: everything a report page shows, as data.

A run has one section for every strategy or configuration; comparison rows put them side by side.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from evenload.report.metrics_file import MetricRow
from evenload.types.layout_decision import LayoutDecision
from evenload.types.length_profile import LengthProfile
from evenload.types.length_unit import LengthUnit
from evenload.types.plan import StepPlan
from evenload.types.time_split import TimeSplit
from evenload.types.timeline import Timeline
from evenload.types.validation import Validation


@dataclass(frozen=True, kw_only=True, eq=False)
class StepView:
    """One step that can be looked at: at least one timeline; without a plan the page cannot say what packs hold."""

    step: int
    predicted: Timeline | None = None
    measured: Timeline | None = None
    plan: StepPlan | None = None

    def timelines(self) -> dict[str, Timeline]:
        """The timelines there are, predicted before measured."""
        both = {"predicted": self.predicted, "measured": self.measured}
        return {origin: timeline for origin, timeline in both.items() if timeline is not None}


@dataclass(frozen=True, kw_only=True, eq=False)
class RunSection:
    """One run, or one strategy that was only simulated.

    Args:
        name: heading and legend entry; unique in a report.
        metrics: rows of `metrics.jsonl`, in file order; empty when nothing was trained.
        steps: what can be looked at, ascending.
        time_split: where the predicted time goes, mean over the steps.
        memory_limit_bytes: drawn as a line.
        notes: sentences shown with the name.
        validations: losses of the validation data, ascending.
        layout_decisions: what was decided about the layout before every step; () where it cannot change.
    """

    name: str
    metrics: tuple[MetricRow, ...] = ()
    steps: tuple[StepView, ...] = ()
    time_split: TimeSplit | None = None
    memory_limit_bytes: int | None = None
    notes: tuple[str, ...] = ()
    validations: tuple[Validation, ...] = ()
    layout_decisions: tuple[LayoutDecision, ...] = ()

    def timelines(self) -> dict[str, tuple[tuple[Timeline, StepPlan | None], ...]]:
        """(timeline, plan) of all steps by origin, predicted before measured."""
        found: dict[str, tuple[tuple[Timeline, StepPlan | None], ...]] = {}
        for origin in ("predicted", "measured"):
            of_origin = tuple(
                (view.timelines()[origin], view.plan) for view in self.steps if origin in view.timelines()
            )
            if of_origin:
                found[origin] = of_origin
        return found


@dataclass(frozen=True, kw_only=True, eq=False)
class RunReport:
    """A whole page.

    Args:
        headline: the outcome in one sentence, without its full stop; "" = none.
        facts: (name, value) pairs: hardware, model, data, layout, strategy, seed, versions.
        comparison: one row a strategy; keys as `evenload plan --json`, and
            `measured_step_time_s`, `measured_tokens_per_s` of `evenload bench`.
        best: name of the comparison row to mark; "" marks none.
        lengths: of the documents of all steps.
    """

    title: str
    headline: str = ""
    facts: tuple[tuple[str, str], ...] = ()
    sections: tuple[RunSection, ...] = ()
    comparison: tuple[Mapping[str, object], ...] = ()
    best: str = ""
    ledger: tuple[str, ...] = ()
    lengths: LengthProfile | None = None
    unit: LengthUnit = "tokens"
