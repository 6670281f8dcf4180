"""`Comparison`: what `evenload.plan` found, as an object."""

import io
from collections.abc import Mapping
from html import escape
from pathlib import Path

from rich.console import Console

from evenload.cli.output_file import write_output
from evenload.cli.plan_files import plan_json, write_plan_trace
from evenload.cli.plan_found import FoundPlans
from evenload.cli.plan_report import plan_report
from evenload.cli.plan_show import show_plans
from evenload.errors import ConfigError
from evenload.explore.evaluate import StrategyResult
from evenload.explore.layout_search import LayoutResult
from evenload.explore.prediction_interval import PredictionInterval
from evenload.explore.worst_batch import WorstBatch
from evenload.integrations.evaluate import EngineEvaluation
from evenload.plan.strategies.strategy import LeftOutStrategy
from evenload.report.columns import is_feasible, shown_columns
from evenload.report.comparison_html import strategies_table
from evenload.report.html import write_report
from evenload.types.counted import counted
from evenload.types.length_unit import LengthUnit
from evenload.types.plan import StepPlan

SHOWN_WIDTH = 140
"""Columns of `str(comparison)`."""
# A notebook has no style for the table of a page.
_STYLE = (
    "<style>.evenload th, .evenload td {text-align: right} .evenload th:first-child, .evenload .text {text-align: left}"
    " .evenload .best {font-weight: bold}</style>"
)


class Comparison:
    """Strategies on the same global batches. `print` shows what `evenload plan` shows; a notebook shows a table.

    Everything but measured planning times is the same for the same lengths, settings and seed.
    """

    def __init__(self, found: FoundPlans) -> None:
        self._found = found

    @property
    def inputs(self) -> Mapping[str, object]:
        """Everything that decides the figures, under the names of `evenload plan --json`."""
        return self._found.said

    @property
    def unit(self) -> LengthUnit:
        """What lengths count: "tokens", or "bytes" of documents that were counted without a tokeniser."""
        return self._found.unit

    @property
    def strategies(self) -> tuple[StrategyResult, ...]:
        """One row each, in the order asked for; of those that cannot run `feasible` is false and `why` says why."""
        return self._found.evaluation.results

    @property
    def best(self) -> str | None:
        """The strategy with the shortest mean step among those that fit memory; None where none does."""
        return self._found.evaluation.best

    @property
    def factor(self) -> float | None:
        """Predicted speed of the best strategy relative to the baseline; None where one of both cannot run."""
        return None if self.best is None else self[self.best].speedup_over_baseline

    @property
    def baseline(self) -> StrategyResult | None:
        """`best_fit` in the windows that suit it best, of `window_tokens`; None where it was not compared or fits
        memory in none."""
        return self._found.evaluation.baseline

    @property
    def headline(self) -> str:
        """The outcome in a sentence; "" where no strategy fits memory."""
        return self._found.headline

    @property
    def interval(self) -> PredictionInterval:
        """Within which factors of a predicted step time nine of ten measured ones lie, and what that rests on."""
        return self._found.interval

    @property
    def left_out(self) -> tuple[LeftOutStrategy, ...]:
        """What "all" does not plan here, and why."""
        return self._found.left_out

    @property
    def layouts(self) -> tuple[LayoutResult, ...]:
        """With `search_layout=True` all layouts, the fastest first; else none."""
        return self._found.layouts

    @property
    def worst(self) -> tuple[WorstBatch, ...] | None:
        """With `worst=N` the batches that need most memory; else None."""
        return self._found.worst

    @property
    def engine(self) -> EngineEvaluation | None:
        """With `engine=NAME` what the plans take there; else None."""
        return self._found.engine

    @property
    def memory_cap_bytes(self) -> int:
        """What a device offers."""
        return self._found.memory_cap_bytes

    def __getitem__(self, strategy: str) -> StrategyResult:
        """The row of a strategy; `ConfigError` where it was not planned."""
        for row in self.strategies:
            if row.name == strategy:
                return row
        raise ConfigError(
            f"strategy '{strategy}' is not in this comparison, which has "
            f"{', '.join(row.name for row in self.strategies)}; name it in strategy=..."
        )

    def plans(self, strategy: str | None = None) -> tuple[StepPlan, ...]:
        """The planned steps of a strategy, the best one's by default; none where it cannot be planned at all.
        `ConfigError` where it was not planned, or on a part of a large cluster only, or nothing fits and none is
        named."""
        name = strategy or self.best
        if name is None:
            raise ConfigError("no strategy fits memory, so there is no best one; name the strategy")
        self._found.require_whole(self[name].name, f"plans of {name}")
        return tuple(proposal.plan for proposal in self._found.evaluation.proposals[self[name].name])

    def require_feasible(self) -> None:
        """`InfeasiblePlanError` where `evenload plan` ends with exit code 3: no strategy fits memory (the message names
        layouts that do), or not with the batch that `worst` found."""
        self._found.require_feasible()

    def to_json(self) -> bytes:
        """All figures, as `evenload plan --json` writes them."""
        return plan_json(self._found)

    def write_html(self, path: str | Path) -> None:
        """The page of `evenload plan --html`; `ConfigError` where it cannot be written."""
        write_output(Path(path).expanduser(), b"")
        write_report(Path(path).expanduser(), plan_report(self._found))

    def write_trace(self, path: str | Path) -> None:
        """The first step of the best strategy for Perfetto; `ConfigError` where it cannot be written, or was planned on
        a part of a large cluster only, `InfeasiblePlanError` where nothing could be planned."""
        for name in (self.best,) if self.best else self._found.evaluation.proposals:
            self._found.require_whole(name, f"trace {path}")
        write_output(Path(path).expanduser(), b"")
        write_plan_trace(Path(path).expanduser(), self._found.evaluation)

    def __str__(self) -> str:
        text = io.StringIO()
        show_plans(Console(file=text, width=SHOWN_WIDTH, color_system=None), self._found)
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines())

    def __repr__(self) -> str:
        return f"Comparison({counted(len(self.strategies), 'strategy')}, best={self.best!r}, factor={self.factor})"

    def _repr_html_(self) -> str:
        """A table for notebooks: strategies that fit, the best one marked, then why the others do not."""
        rows = [row for row in self._found.rows if is_feasible(row)]
        columns = shown_columns(rows, self.unit)
        lines = [f"<p>{escape(self.headline)}</p>"] if self.headline else []
        lines.append(f'{_STYLE}<div class="evenload">{strategies_table(rows, (), columns, self.best)}</div>')
        lines += [
            f"<p>{escape(row['name'])}: not feasible: {escape(row['why'])}</p>"
            for row in self._found.rows
            if not is_feasible(row)
        ]
        if self.best is not None:
            lines.append(f"<p>{escape(self.interval.describe())}</p>")
        return "\n".join(lines)
