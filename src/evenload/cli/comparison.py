"""`Comparison`: the result of `evenload plan`, as text, table, JSON, page and trace. Needs no torch."""

import io
from dataclasses import dataclass
from functools import cached_property
from html import escape
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Console

from evenload.cli.options import print_lines, write_output
from evenload.cli.plan_layout import SearchedLayouts
from evenload.cli.plan_messages import (
    baseline_row,
    bound_message,
    engine_messages,
    headline_message,
    rows_in_unit,
    worst_message,
)
from evenload.data.lengths import profile_lengths
from evenload.errors import ConfigError, InfeasiblePlanError
from evenload.explore.batches import SampledBatch
from evenload.explore.evaluate import Evaluation, StrategyResult, headline
from evenload.explore.layout_search import LayoutResult
from evenload.explore.prediction_interval import PredictionInterval
from evenload.explore.timelines import detailed_timeline
from evenload.explore.worst_batch import WorstBatch
from evenload.integrations.evaluate import EngineEvaluation
from evenload.plan.strategies.baselines import BEST_FIT
from evenload.plan.strategies.strategy import LeftOutStrategy
from evenload.report.chrome_trace import label_packs, write_chrome_trace
from evenload.report.html import strategies_table, write_report
from evenload.report.run_report import RunReport, RunSection, StepView
from evenload.report.table import ComparisonTable, EngineTable, LayoutTable, is_feasible, shown_columns
from evenload.report.units import format_layout
from evenload.stepplan.plan_file import encode_plan_file
from evenload.types.plan import StepPlan
from evenload.types.text import LengthUnit, counted, format_bytes, in_unit

SHOWN_WIDTH = 140
"""Columns of `str(comparison)`."""
# A notebook has no style for the table of a page.
_STYLE = (
    "<style>.evenload th, .evenload td {text-align: right} .evenload th:first-child, .evenload .text {text-align: left}"
    " .evenload .best {font-weight: bold}</style>"
)
_FORMATS = {
    "layout": format_layout,
    "memory_cap_bytes": format_bytes,
    "host_memory_cap_bytes_per_node": format_bytes,
    "parameters": "{:,}".format,
    "active_parameters": "{:,}".format,
}


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Comparison:
    """Compares strategies on the same global batches: `print` shows what `evenload plan` shows, a notebook a table.

    Everything but measured planning times is the same for the same lengths, settings and seed.

    Args:
        inputs: everything that decides the figures, under the names of `evenload plan --json`.
        unit: of lengths: "tokens", or "bytes" of documents that were counted without a tokeniser.
        batches: the global batches that were planned.
        evaluation: figures and planned steps of the strategies.
        left_out: strategies that "all" does not plan here, and why.
        searched: with `search_layout=True` the layouts of every strategy; else None.
        worst: with `worst=N` the batches that need most memory; else None.
        engine: with `engine=NAME` what the plans take there; else None.
        interval: within which factors of a predicted step time nine of ten measured ones lie, and its basis.
        memory_cap_bytes: what a device offers.
        fitting_layouts: names layouts that fit where no strategy does; else "".
    """

    inputs: dict[str, Any]
    unit: LengthUnit
    batches: tuple[SampledBatch, ...]
    evaluation: Evaluation
    left_out: tuple[LeftOutStrategy, ...]
    searched: SearchedLayouts | None
    worst: tuple[WorstBatch, ...] | None
    engine: EngineEvaluation | None
    interval: PredictionInterval
    memory_cap_bytes: int
    fitting_layouts: str = ""

    @property
    def strategies(self) -> tuple[StrategyResult, ...]:
        """One row each, in the order requested; of those that cannot run `feasible` is false and `why` says why."""
        return self.evaluation.results

    @property
    def best(self) -> str | None:
        """The strategy with the shortest mean step among those that fit memory; None where none does."""
        return self.evaluation.best

    @property
    def factor(self) -> float | None:
        """Predicted speed of the best strategy relative to the baseline; None where one of both cannot run."""
        return None if self.best is None else self[self.best].speedup_over_baseline

    @property
    def baseline(self) -> StrategyResult | None:
        """`best_fit` in the windows that suit it best, of `window_tokens`; None where it was not compared or fits
        memory in none."""
        return self.evaluation.baseline

    @cached_property
    def headline(self) -> str:
        """The outcome in a sentence; "" where no strategy fits memory."""
        return in_unit(headline_message(self.evaluation), self.unit)

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """Rows of tables: the strategies, and behind `best_fit` the baseline where its windows are others."""
        rows = []
        for result in self.strategies:
            rows.append(msgspec.to_builtins(result))
            row = baseline_row(self.evaluation) if result.name == BEST_FIT.name else None
            if row is not None and row["name"] != BEST_FIT.name:
                rows.append(row)
        return rows_in_unit(rows, self.unit)

    @property
    def layouts(self) -> tuple[LayoutResult, ...]:
        """With `search_layout=True` all layouts of the fastest strategy, the best first; else none."""
        return self.searched.fastest.layouts if self.searched else ()

    def __getitem__(self, strategy: str) -> StrategyResult:
        """Return the row of a strategy; `ConfigError` where it was not planned."""
        for row in self.strategies:
            if row.name == strategy:
                return row
        raise ConfigError(
            f"strategy '{strategy}' is not in this comparison, which has "
            f"{', '.join(row.name for row in self.strategies)}; name it in strategy=..."
        )

    def plans(self, strategy: str | None = None) -> tuple[StepPlan, ...]:
        """Return the planned steps of a strategy, by default the best one's; () where it cannot be planned at all.
        `ConfigError` where it was not planned, or on a part of a large cluster only, or nothing fits and none is
        named."""
        name = strategy or self.best
        if name is None:
            raise ConfigError("no strategy fits memory, so there is no best one; name the strategy")
        if self.searched:
            self.searched.require_whole(self[name].name, f"plans of {name}")
        return tuple(proposal.plan for proposal in self.evaluation.proposals[self[name].name])

    def require_feasible(self) -> None:
        """Raise `InfeasiblePlanError` where `evenload plan` ends with exit code 3: no strategy fits memory (the message
        names layouts that do), or not with a batch in `worst`."""
        # What an engine holds depends on its settings, so memory refuses plans for Evenload's own runtime only.
        if self.best is None and not (self.engine and self.engine.best):
            closest = min(self.rows, key=lambda row: row["peak_memory_bytes"] or float("inf"))
            hint = f"; {self.fitting_layouts}" if self.fitting_layouts else ""
            raise InfeasiblePlanError(f"no strategy fits; the closest: {closest['why']}{hint}")
        if exceeding := [one.strategy for one in self.worst or () if not one.fits]:
            raise InfeasiblePlanError(
                f"the lengths hold global batches that exceed memory under {', '.join(exceeding)} (the lines above "
                "name one for each); train with a policy that fits, in another layout, or on smaller batches"
            )

    def show(self, console: Console) -> None:
        """Print everything that `evenload plan` prints after its inputs."""
        print_lines(console, self.headline)
        if any(result.feasible for result in self.strategies):
            console.print(ComparisonTable(self.rows, self.best or "", unit=self.unit))
        else:
            print_lines(console, *(f"{row['name']}: not feasible: {row['why']}" for row in self.rows))
        print_lines(console, *(f"left out of --strategy all: {one.name}: {one.why}" for one in self.left_out))
        if self.best:
            print_lines(console, self.interval.describe(), bound_message(self.evaluation))
        print_lines(console, *(f"{row['name']}: {row['note']}" for row in self.rows if row["note"]))
        for result in self.strategies:
            if result.layout_decisions:
                title = f"{result.name}: layout of every step, predicted"
                console.print(LayoutTable(result.layout_decisions, title))
        print_lines(console, *(worst_message(one, self.memory_cap_bytes, self.unit) for one in self.worst or ()))
        if self.engine is not None:
            rows = rows_in_unit(msgspec.to_builtins(self.engine.results), self.unit)
            title = f"on {self.engine.engine} ({self.engine.title}), predicted"
            console.print(EngineTable(rows, self.engine.best, title))
            print_lines(console, *engine_messages(self.engine, self.evaluation, self.unit))

    def to_json(self) -> bytes:
        """Return all figures, as `evenload plan --json` writes them."""
        figures = headline(self.evaluation)
        content: dict[str, Any] = {
            "version": version("evenload"),
            "inputs": self.inputs,
            "headline": figures and {"text": self.headline, **msgspec.to_builtins(figures)},
            "strategies": rows_in_unit(msgspec.to_builtins(self.strategies), self.unit),
            "best": self.best,
            "baseline": baseline_row(self.evaluation),
            "step_time_interval": self.interval,
            "left_out": self.left_out,
        }
        if (engine := self.engine) is not None:
            content["engine"] = {
                "name": engine.engine,
                "title": engine.title,
                "strategies": engine.results,
                "best": engine.best or None,
                "left_out": engine.left_out,
                "not_adapted": engine.not_adapted,
            }
        if self.worst is not None:
            content["worst"] = self.worst
        if self.searched is not None:
            content |= {"layouts": self.layouts, "search": self.searched.content()}
        return msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n"

    def plan_file(self) -> bytes:
        """Return the planned steps of all strategies, as `evenload plan --emit-plan` writes them."""
        of_strategies = self.evaluation.proposals.values()
        return encode_plan_file([proposal.plan for proposals in of_strategies for proposal in proposals])

    def write_html(self, path: str | Path) -> None:
        """Write the page of `evenload plan --html`; `ConfigError` where it cannot be written."""
        path = Path(path).expanduser()
        write_output(path, b"")
        write_report(path, self._report())

    def write_trace(self, path: str | Path) -> None:
        """Write the first step of the best strategy, or of any that could be planned, for Perfetto; `ConfigError` where
        the file cannot be written, or the strategy was planned on a part of a large cluster only,
        `InfeasiblePlanError` where nothing could be planned."""
        path = Path(path).expanduser()
        planned = [name for name, proposals in self.evaluation.proposals.items() if proposals]
        if not planned:
            raise InfeasiblePlanError(f"--trace {path}: no strategy could be planned, so there is no timeline to write")
        name = self.best or planned[0]
        if self.searched:
            self.searched.require_whole(name, f"trace {path}")
        write_output(path, b"")
        proposal = self.evaluation.proposals[name][0]
        timeline = detailed_timeline(proposal.plan, proposal.costs)
        write_chrome_trace(path, {"predicted": timeline}, label_packs(proposal.plan))

    def _report(self) -> RunReport:
        notes: dict[str, tuple[str, ...]] = {row["name"]: (row["note"],) for row in self.rows if row["note"]}
        for one in self.worst or ():
            message = worst_message(one, self.memory_cap_bytes, self.unit)
            notes[one.strategy] = (*notes.get(one.strategy, ()), message)
        lengths = np.array([document.num_tokens for batch in self.batches for document in batch.documents], np.int64)
        facts = [
            (
                in_unit(name.replace("_bytes", "").replace("_", " "), self.unit),
                _FORMATS.get(name, str)(value),
            )
            for name, value in self.inputs.items()
            if value is not None
        ]
        facts.append(("predicted step times", self.interval.describe()))
        if self.engine is not None:
            messages = engine_messages(self.engine, self.evaluation, self.unit)
            facts.append((f"on engine {self.engine.engine}", " · ".join(messages)))
        return RunReport(
            title=f"Evenload plan: {self.inputs['model']} on {self.inputs['cluster']}",
            headline=self.headline,
            facts=tuple(facts),
            sections=tuple(
                RunSection(
                    name=result.name,
                    steps=tuple(
                        StepView(step=one.plan.step, predicted=detailed_timeline(one.plan, one.costs), plan=one.plan)
                        for one in self.evaluation.proposals[result.name]
                    ),
                    time_split=result.time_split,
                    memory_limit_bytes=self.memory_cap_bytes,
                    notes=notes.get(result.name, ()),
                    layout_decisions=result.layout_decisions,
                )
                for result in self.strategies
                if self.evaluation.proposals[result.name]
            ),
            comparison=tuple(self.rows),
            best=self.best or "",
            lengths=profile_lengths(lengths, ()) if len(lengths) else None,
            unit=self.unit,
        )

    def __str__(self) -> str:
        text = io.StringIO()
        self.show(Console(file=text, width=SHOWN_WIDTH, color_system=None))
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines())

    def __repr__(self) -> str:
        return f"Comparison({counted(len(self.strategies), 'strategy')}, best={self.best!r}, factor={self.factor})"

    def _repr_html_(self) -> str:
        """Return a table for notebooks: strategies that fit, the best one marked, then why the others do not."""
        rows = [row for row in self.rows if is_feasible(row)]
        lines = [f"<p>{escape(self.headline)}</p>"] if self.headline else []
        table = strategies_table(rows, (), shown_columns(rows, self.unit), self.best)
        lines.append(f'{_STYLE}<div class="evenload">{table}</div>')
        lines += [
            f"<p>{escape(row['name'])}: not feasible: {escape(row['why'])}</p>"
            for row in self.rows
            if not is_feasible(row)
        ]
        if self.best is not None:
            lines.append(f"<p>{escape(self.interval.describe())}</p>")
        return "\n".join(lines)
