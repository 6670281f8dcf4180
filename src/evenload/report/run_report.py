"""`RunReport`: everything a report page shows, as data.

A run has one section for every strategy or configuration; comparison rows put them side by side.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from evenload.report.metrics_file import MetricRow
from evenload.report.pack_label import PackKey, PackLabel
from evenload.types.timeline import Timeline


@dataclass(frozen=True, kw_only=True, eq=False)
class RunSection:
    """One run, or one strategy that was only simulated.

    Args:
        name: heading and legend entry, for example the strategy's name; unique in a report.
        metrics: rows of `metrics.jsonl`, in file order; empty when nothing was trained.
        predicted, measured: one step's timelines, of the same step when both are given.
        timeline_step: the step they show.
        task_labels: content of the packs of that step, by (dp rank, direction, pack).
        memory_limit_bytes: what a device may hold, drawn as a line.
        notes: sentences shown under the heading, for example why a strategy is not feasible.
    """

    name: str
    metrics: tuple[MetricRow, ...] = ()
    predicted: Timeline | None = None
    measured: Timeline | None = None
    timeline_step: int | None = None
    task_labels: Mapping[PackKey, PackLabel] = field(default_factory=dict)
    memory_limit_bytes: int | None = None
    notes: tuple[str, ...] = ()

    def timelines(self) -> dict[str, Timeline]:
        """The timelines there are, predicted before measured."""
        both = {"predicted": self.predicted, "measured": self.measured}
        return {origin: timeline for origin, timeline in both.items() if timeline is not None}


@dataclass(frozen=True, kw_only=True, eq=False)
class RunReport:
    """A whole page.

    Args:
        title: heading and browser title.
        facts: (name, value) pairs: hardware, model, data, layout, strategy, seed, versions.
        sections: in the order shown.
        comparison: one row a strategy; keys as `evenload plan --json` (DESIGN §11), and
            `measured_step_time_s`, `measured_tokens_per_s`, `final_loss` for trained runs.
        best: name of the comparison row to mark; "" marks none.
        ledger: lines of the token ledger, shown as they are.
    """

    title: str
    facts: tuple[tuple[str, str], ...] = ()
    sections: tuple[RunSection, ...] = ()
    comparison: tuple[Mapping[str, object], ...] = ()
    best: str = ""
    ledger: tuple[str, ...] = ()
