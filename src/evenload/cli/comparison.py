"""`Comparison`: the result of `evenload plan`, as text, table, JSON, page and trace. Needs no torch."""

import io
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Console

from evenload.cli.first_lines import dropped_share, engine_sentence, equally_fast, first_sentences, next_line, option_of
from evenload.cli.options import indented_json, print_lines, write_output
from evenload.cli.plan_layout import SearchedLayouts, fitting_text
from evenload.cost.pack_cost import PackCosts
from evenload.data.lengths import profile_lengths
from evenload.errors import ConfigError, InfeasiblePlanError
from evenload.explore.batches import SampledBatch
from evenload.explore.evaluate import Evaluation, StrategyResult
from evenload.explore.layout_search import FewLayouts, LayoutResult
from evenload.explore.prediction_interval import PredictionInterval
from evenload.explore.timelines import detailed_timeline
from evenload.explore.tree_savings import TreeSavings
from evenload.explore.worst_batch import WorstBatch
from evenload.integrations.evaluate import EngineEvaluation
from evenload.planning.strategies.baselines import BEST_FIT
from evenload.planning.strategies.strategy import LeftOutStrategy
from evenload.report.chrome_trace import label_packs, write_chrome_trace
from evenload.report.html import fastest_table, write_report
from evenload.report.run_report import RunReport, RunSection, StepView
from evenload.report.table import READ_LAYOUTS, ComparisonTable, engine_table, is_feasible, layout_table
from evenload.stepplan.plan_file import encode_plan_file
from evenload.types.plan import StepPlan
from evenload.types.text import (
    LengthUnit,
    counted,
    format_bytes,
    format_interval,
    format_layout,
    format_power_of_two,
    format_seconds,
    in_unit,
)
from evenload.types.timeline import Timeline

SHOWN_WIDTH = 140
"""Columns of `str(comparison)`."""
# A notebook has no style for the table of a page.
_STYLE = (
    "<style>.evenload th, .evenload td {text-align: right} .evenload th:first-child, .evenload .text {text-align: left}"
    " .evenload .best {font-weight: bold}</style>"
)
_FORMATS = {"layout": format_layout, "memory_cap_bytes": format_bytes, "host_memory_cap_bytes_per_node": format_bytes}


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
        savings: what sharing prefixes saves under the strategy to take first; None where none are shared.
        engine: with `engine=NAME` what the plans take there; else None.
        interval: within which factors of a predicted step time nine of ten measured ones lie, and its basis.
        memory_cap_bytes: what a device offers.
        few_layouts: of which the best was taken, or, where a layout was given, that were priced beside it; else None.
        facts: what was planned, in a line; remarks: what the figures rest on that may surprise.
    """

    inputs: dict[str, Any]
    unit: LengthUnit
    batches: tuple[SampledBatch, ...]
    evaluation: Evaluation
    left_out: tuple[LeftOutStrategy, ...]
    searched: SearchedLayouts | None
    worst: tuple[WorstBatch, ...] | None
    savings: TreeSavings | None
    engine: EngineEvaluation | None
    interval: PredictionInterval
    memory_cap_bytes: int
    few_layouts: FewLayouts | None = None
    facts: str = ""
    remarks: tuple[str, ...] = ()

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
        """The answer in a few sentences: the fastest strategies, what sharing prefixes saves, a layout that is faster
        than the one that was given, and what batches leave out or repeat."""
        sentences = first_sentences(self.evaluation, self.inputs, self.batches, self.few_layouts, self.savings)
        if self.engine is not None and self.engine.best:
            runtime = sentences[0].replace("Fastest with", "In Evenload's runtime with")
            sentences = (engine_sentence(self.engine, self.inputs), runtime, *sentences[1:])
        return " ".join(sentences)

    @property
    def next_step(self) -> str:
        """The setting or command that follows."""
        if self.engine is not None and self.engine.best:
            name = self.engine.engine
            own = "PackedTrainer or PackedSFTTrainer" if name == "trainer" else f'PackedLoader(..., engine="{name}")'
            return f"next: {own}, whose strategy is auto (docs/loader.md)"
        return next_line(self.evaluation, self.inputs, self.few_layouts)

    @property
    def equally_fast(self) -> tuple[str, ...]:
        """The strategies that are as fast as the best one within the error of prediction, the one to take first."""
        return tuple(row.name for row in equally_fast(self.evaluation))

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """Rows of tables: the strategies that are equally fast, the one to take first, then the others by speed, those
        that cannot run last; and the baseline where its windows are others than those of `best_fit`."""
        rows = [msgspec.to_builtins(result) for result in self.strategies]
        if (baseline := _baseline_row(self.evaluation)) is not None and baseline["name"] != BEST_FIT.name:
            rows.append(baseline)
        place = {name: at for at, name in enumerate(self.equally_fast)}
        last = len(place)
        rows.sort(key=lambda row: (not row["feasible"], place.get(row["name"], last), row["mean_step_time_s"] or 0.0))
        return _rows_in_unit(rows, self.unit)

    @property
    def layouts(self) -> tuple[LayoutResult, ...]:
        """With `search_layout=True` all layouts of the fastest strategy, the best first; else none."""
        return self.searched.fastest.layouts if self.searched else ()

    def __getitem__(self, strategy: str) -> StrategyResult:
        """Return the row of a strategy; `ConfigError` where it was not planned."""
        rows = {row.name: row for row in self.strategies}
        if strategy not in rows:
            raise ConfigError(
                f"strategy '{strategy}' is not in this comparison, which has {', '.join(rows)}; name it in strategy=..."
            )
        return rows[strategy]

    def plans(self, strategy: str | None = None) -> tuple[StepPlan, ...]:
        """Return the planned steps of a strategy, by default the best one's; () where it cannot be planned at all.
        `ConfigError` where it was not planned, or on a part of a large cluster only, or nothing fits."""
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
            hint = f"; {fitting_text(self.few_layouts)}" if self.few_layouts and not self.searched else ""
            raise InfeasiblePlanError(f"no strategy fits; the closest: {closest['why']}{hint}")
        if exceeding := [one.strategy for one in self.worst or () if not one.fits]:
            raise InfeasiblePlanError(
                f"the lengths hold global batches that exceed memory under {', '.join(exceeding)} (the lines above "
                "name one for each); train with a policy that fits, in another layout, or on smaller batches"
            )

    def show(self, console: Console, *, details: bool = False) -> None:
        """Print what `evenload plan` prints; with `details` also slower strategies, and how figures came about."""
        print_lines(console, self.headline)
        if self.engine is not None:
            rows = _rows_in_unit(msgspec.to_builtins(self.engine.results), self.unit)
            title = f"on {self.engine.engine} ({self.engine.title}), predicted"
            console.print(engine_table((row for row in rows if not row["why"]), self.engine.best, title))
            print_lines(console, *(f"{row['name']}: not planned: {row['why']}" for row in rows if row["why"]))
            print_lines(console, *self._engine_messages(self.engine))
        # Strategies that were named are shown all.
        rows = {"has_all_rows": details or self.inputs["strategy"] != "all", "has_all_columns": details}
        console.print(ComparisonTable(self.rows, self.equally_fast, self.unit, **rows))
        print_lines(console, *(in_unit(remark, self.unit) for remark in self.remarks))
        print_lines(console, *(self.searched.summary() if self.searched else ()))
        if details:
            self._show_details(console)
        elif self.best and self.interval.low is None:
            print_lines(console, self.interval.describe())
        print_lines(console, *(self._worst_message(one) for one in self.worst or ()))
        print_lines(console, self.facts, self.next_step)

    def _show_details(self, console: Console) -> None:
        print_lines(console, *(f"left out of --strategy all: {one.name}: {one.why}" for one in self.left_out))
        if self.best:
            print_lines(console, self.interval.describe())
        if self.few_layouts is not None:
            print_lines(console, fitting_text(self.few_layouts))
        print_lines(console, *(f"{row['name']}: {row['note']}" for row in self.rows if row["note"]))
        for result in self.strategies:
            if result.layout_decisions:
                console.print(layout_table(result.layout_decisions, f"{result.name}: layout of every step, predicted"))
                print_lines(console, READ_LAYOUTS)

    def to_json(self) -> bytes:
        """Return all figures, as `evenload plan --json` writes them."""
        content: dict[str, Any] = {
            "version": version("evenload"),
            "inputs": self.inputs,
            "headline": self.headline or None,
            "strategies": _rows_in_unit(msgspec.to_builtins(self.strategies), self.unit),
            "best": self.best,
            "equally_fast": self.equally_fast,
            "few_layouts": self.few_layouts and self.few_layouts.layouts,
            "next": self.next_step,
            "baseline": _baseline_row(self.evaluation),
            "step_time_interval": self.interval,
            "left_out": self.left_out,
        }
        if (engine := self.engine) is not None:
            content["engine"] = {"name": engine.engine, "strategies": engine.results, "best": engine.best or None}
            content["engine"] |= {name: getattr(engine, name) for name in ("title", "left_out", "not_adapted")}
        if self.worst is not None:
            content["worst"] = self.worst
        if self.savings is not None:
            content["shared_prefixes"] = self.savings
        if self.searched is not None:
            by_strategy = {one.strategy: one for one in self.searched.results}
            content["layouts"] = self.layouts
            content["search"] = {"limit_s": self.searched.limit_s, "strategies": by_strategy}
        return indented_json(content)

    def plan_file(self) -> bytes:
        """Return the planned steps of all strategies, as `evenload plan --emit-plan` writes them."""
        proposals = chain.from_iterable(self.evaluation.proposals.values())
        return encode_plan_file([proposal.plan for proposal in proposals])

    def write_html(self, path: str | Path) -> None:
        """Write the page of `evenload plan --html`; `ConfigError` where it cannot be written."""
        path = Path(path).expanduser()
        write_output(path, b"")
        write_report(path, self._report())

    def write_trace(self, path: str | Path) -> None:
        """Write the first step of the best strategy, or of any that could be planned, for Perfetto. `ConfigError`: the
        file cannot be written, or a part of a cluster was planned; `InfeasiblePlanError`: nothing could be planned."""
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
        notes = defaultdict(list, {row["name"]: [row["note"]] for row in self.rows if row["note"]})
        for one in self.worst or ():
            notes[one.strategy].append(self._worst_message(one))
        sequences = (document for batch in self.batches for document in batch.alone or batch.documents)
        lengths = np.array([one.num_tokens for one in sequences], np.int64)
        facts = [
            (in_unit(name.replace("_bytes", "").replace("_", " "), self.unit), _FORMATS.get(name, str)(value))
            for name, value in self.inputs.items()
            if value not in (None, "", (), {})
            and not isinstance(value, bool)
            and "parameters" not in name  # model_size
        ]
        facts.append(("predicted step times", self.interval.describe()))
        if self.engine is not None:
            facts.append((f"on engine {self.engine.engine}", " · ".join(self._engine_messages(self.engine))))
        return RunReport(
            title=f"Evenload plan: {self.inputs['model']} on {self.inputs['cluster']}",
            headline=self.headline,
            cards=self._cards(),
            summary=self._summary(),
            next_step=self.next_step,
            facts=tuple(facts),
            sections=tuple(
                RunSection(
                    name=result.name,
                    steps=tuple(step_view(one.plan, one.costs) for one in self.evaluation.proposals[result.name]),
                    time_split=result.time_split,
                    memory_limit_bytes=self.memory_cap_bytes,
                    notes=tuple(notes[result.name]),
                    layout_decisions=result.layout_decisions,
                )
                for result in self.strategies
                if self.evaluation.proposals[result.name]
            ),
            comparison=tuple(self.rows),
            best=self.equally_fast,
            lengths=profile_lengths(lengths, ()) if len(lengths) else None,
            unit=self.unit,
        )

    def _cards(self) -> tuple[tuple[str, str, str], ...]:
        """Return step time, gains and memory headroom of the strategy to take."""
        if not (near := self.equally_fast):
            return ()
        best, cap_bytes = self[near[0]], self.memory_cap_bytes
        interval, peak_bytes, gain = best.step_time_interval_s, best.peak_memory_bytes or 0, best.speedup_over_baseline
        nine = f"nine of ten steps: {format_interval(interval)}" if interval else "no interval is known"
        saved = self.savings.speedup if self.savings else None
        return (
            ("step time, predicted", format_seconds(best.mean_step_time_s), nine),
            ("speed, best-fit packing = 1", "not compared" if gain is None else f"{gain:.2f}×", best.name),
            *([("speed, nothing shared = 1", f"{saved:.2f}×", "by sharing prefixes")] if saved else ()),
            ("memory left", format_bytes(cap_bytes - peak_bytes), f"of {format_bytes(cap_bytes)} a device"),
        )

    def _summary(self) -> str:
        inputs = self.inputs
        size = f"{inputs['tokens']:,} {self.unit}" if inputs["tokens"] else counted(inputs["documents"], "document")
        lost = f"{100 * dropped_share(self.batches):.0f} % of {self.unit} not trained"
        layout = f"layout {option_of(inputs['layout'])}"
        return " · ".join((layout, f"context {inputs['context']:,}", f"{size} a step", lost))

    def _worst_message(self, worst: WorstBatch) -> str:
        """Say how much memory the worst batch of a search needs, and which documents it holds."""
        longest = ", ".join(f"{length:,}" for length in worst.longest)
        more = ", ..." if worst.documents > len(worst.longest) else ""
        policies = ", ".join(f"{policy} {count:,}" for policy, count in worst.policies.items())
        verdict = "fits" if worst.fits else f"does not fit: {worst.why}"
        if worst.leaves_out_deferred:
            left_out = f"Documents that {worst.strategy} has put off in earlier steps"
            verdict += f". {left_out} may come on top; they are not counted"
        return in_unit(
            f"{worst.strategy}: the worst of {counted(worst.searched, 'global batch')} searched ({worst.drawn}: "
            f"{worst.documents:,} documents of {longest}{more} tokens, {worst.tokens:,} in all) takes "
            f"{format_bytes(worst.peak_memory_bytes)} of {format_bytes(self.memory_cap_bytes)} with {policies} and "
            f"{verdict}",
            self.unit,
        )

    def _engine_messages(self, engine: EngineEvaluation) -> tuple[str, ...]:
        """Say what the engine's table does not: the assumptions, the best of both, and what was left out."""
        name, refused = engine.engine, engine.not_adapted
        messages = [
            f"{name}: predicted from the cost model of Evenload's runtime and the engine's order, padding and waiting; "
            "not measured on GPUs, its memory is not predicted (docs/engines.md)",
            *(f"{name}: Evenload's adapter does not run these plans: {one.why}. {one.instead}" for one in refused),
        ]
        best = next((result for result in engine.results if result.name == engine.best), None)
        if best is not None and best.micro_batches_per_rank is not None:
            per_rank = counted(best.micro_batches_per_rank, "micro-batch")
            messages.append(f"{name}: {best.name} has {per_rank} on every rank in every step")
        messages += [f"left out on {name}: {one.name}: {one.why}" for one in engine.left_out]
        return tuple(in_unit(message, self.unit) for message in messages)

    def __str__(self) -> str:
        text = io.StringIO()
        self.show(Console(file=text, width=SHOWN_WIDTH, color_system=None))
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines())

    def __repr__(self) -> str:
        return f"Comparison({counted(len(self.strategies), 'strategy')}, best={self.best!r}, factor={self.factor})"

    def _repr_html_(self) -> str:
        """Return the answer and a table for notebooks: the fastest strategies, then why others do not fit."""
        table = fastest_table(self.rows, self.equally_fast, self.unit)
        texts = [f"{row['name']}: not feasible: {row['why']}" for row in self.rows if not is_feasible(row)]
        if self.best is not None:
            texts.append(self.interval.describe())
        head = f"<p>{escape(self.headline)}</p>" if self.headline else ""
        return f'{head}{_STYLE}<div class="evenload">{table}</div>' + "".join(f"<p>{escape(one)}</p>" for one in texts)


def step_view(plan: StepPlan, costs: PackCosts, measured: Timeline | None = None) -> StepView:
    """Return a step for a page: as predicted, and as measured where it was."""
    return StepView(step=plan.step, predicted=detailed_timeline(plan, costs), measured=measured, plan=plan)


def _baseline_row(evaluation: Evaluation) -> dict[str, Any] | None:
    """Return `best_fit` in the windows that suit it best, its name with their tokens where they were not requested."""
    if (baseline := evaluation.baseline) is None or baseline.window_tokens is None:
        return None
    requested = next(result for result in evaluation.results if result.name == BEST_FIT.name)
    row = msgspec.to_builtins(baseline)
    if baseline.step_time_s == requested.step_time_s:
        return row
    return row | {"name": f"{BEST_FIT.name} {format_power_of_two(baseline.window_tokens)}"}


def _rows_in_unit(rows: Sequence[dict[str, Any]], unit: LengthUnit) -> list[dict[str, Any]]:
    """Return rows of a comparison whose sentences name the unit that was counted."""
    return [row | {name: in_unit(row[name], unit) for name in ("why", "note") if name in row} for row in rows]
