"""`evenload.plan`: what `evenload plan` computes, as a function, with its keyword arguments (`PlanSettings`) and its
result (`Comparison`). Needs no torch."""

import io
import os
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from evenload.cli.options import write_output
from evenload.cli.plan import plan_json, plan_report, show_plans, write_plan_trace
from evenload.cli.plan_arguments import LengthSource, PlanArguments
from evenload.cli.plan_found import FoundPlans, find_plans
from evenload.data.config import DataConfig, OnCorrupt, Overlong, RecordKind
from evenload.data.lengths import LengthTable, checked_lengths
from evenload.errors import ConfigError, DataError
from evenload.explore.evaluate import StrategyResult
from evenload.explore.layout_search import LayoutResult
from evenload.explore.prediction_interval import PredictionInterval
from evenload.explore.worst_batch import WorstBatch
from evenload.integrations.evaluate import EngineEvaluation
from evenload.plan.strategies.strategy import LeftOutStrategy
from evenload.report.html import strategies_table, write_report
from evenload.report.table import is_feasible, shown_columns
from evenload.types.plan import StepPlan
from evenload.types.text import LengthUnit, counted


class PlanSettings(TypedDict, total=False):
    """What is left out has the default of `evenload plan --help`, or that of the run whose config.toml is named.

    Of documents that are counted: `tokenizer`, `record`, `include`, `on_corrupt`. Of batches: `overlong`, `seed`. Of
    planning: `policy`, `dp_merge`, `window`, `max_delay_steps`, `known_steps`, and `set_options`, as `--set` takes
    them: `["wlb.release=queues"]`. Beside the comparison: `engine`, `worst`, `search_layout` and, for the most time
    that it takes, `search_seconds`. `cost` is a measured cost file.
    """

    overlong: Overlong | None
    tokenizer: str | None
    record: RecordKind | None
    include: Sequence[str] | None
    on_corrupt: OnCorrupt | None
    engine: str | None
    dp_merge: bool | None
    policy: Literal["choose", "replay", "recompute", "offload"] | None
    window: int | None
    max_delay_steps: int | None
    set_options: Sequence[str] | None
    known_steps: int | None
    seed: int
    worst: int | None
    cost: str | Path | None
    search_layout: bool
    search_seconds: float | None


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


GIVEN = "lengths of the caller"
"""Names lengths that were given as numbers."""


def plan(
    lengths: str | os.PathLike[str] | Sequence[int] | NDArray[np.integer],
    *,
    cluster: str | os.PathLike[str] | None = None,
    model: str | os.PathLike[str] | None = None,
    layout: str | None = None,
    documents: int | None = None,
    tokens: int | str | None = None,
    context: int | str | None = None,
    strategy: str | Sequence[str] = "all",
    steps: int = 1,
    **further: Unpack[PlanSettings],
) -> Comparison:
    """Compare strategies on document lengths, without a GPU: `evenload plan`, with its defaults.

        found = evenload.plan("lengths.npy", model="llama3-8b", cluster="h100x32", context="16k", overlong="truncate")
        print(found.best, found.factor)
        print(found)

    Args:
        lengths: numbers of tokens, or what `evenload plan` takes: a file of lengths, documents that are counted, or the
            config.toml of a run.
        cluster: a built-in name such as "h100x32", or a TOML file. Not needed with a config.toml: this machine.
        model: a built-in name, or a Hugging Face config.json or its folder; not needed with a config.toml.
        layout: such as "dp=4,pp=8". Default: the shallowest that fits, or that of the run.
        documents, tokens: of a global batch, one of both; "128k" is 131,072.
        context: longest document trained whole, and the most tokens of a pack.
        strategy: "all", or names.
        steps: global batches to plan.
        further: other options of the command, see `PlanSettings`.

    Raises:
        ConfigError: settings that cannot work, with the reason. DataError: lengths that are none, or documents that
            cannot be read. InfeasiblePlanError: no layout holds the model. Where strategies do not fit memory their
            rows say so; `Comparison.require_feasible` raises where none does.
    """
    given: dict[str, Any] = {**further}
    if unknown := sorted(set(given) - set(PlanSettings.__annotations__)):
        raise ConfigError(
            f"evenload.plan knows no setting {', '.join(unknown)}; it takes {', '.join(PlanSettings.__annotations__)}"
        )
    for name in ("include", "set_options"):
        if given.get(name) is not None:
            given[name] = list(given[name])
    if given.get("cost") is not None:
        given["cost"] = Path(given["cost"]).expanduser()
    is_named = isinstance(lengths, str | os.PathLike)
    asked = PlanArguments(
        lengths=os.path.expanduser(lengths) if isinstance(lengths, str | os.PathLike) else GIVEN,
        cluster=None if cluster is None else os.path.expanduser(cluster),
        model=None if model is None else os.path.expanduser(model),
        layout=layout,
        documents=documents,
        tokens=None if tokens is None else str(tokens),
        context=None if context is None else str(context),
        strategy=strategy if isinstance(strategy, str) else ",".join(strategy),
        steps=steps,
        **given,
    )
    source = None if is_named else _given_lengths(lengths)
    return Comparison(find_plans(asked, Console(quiet=True), source))


def _given_lengths(lengths: Sequence[int] | NDArray[np.integer]) -> LengthSource:
    numbers = np.asarray(lengths)
    if numbers.ndim != 1 or (numbers.size and not np.issubdtype(numbers.dtype, np.integer)):
        raise DataError(
            f"lengths are {numbers.dtype} of shape {numbers.shape}; give one whole number a document, or the name of "
            "a file"
        )
    table = LengthTable(lengths=checked_lengths(numbers.astype(np.int64), GIVEN), unit="tokens", tokenizer=None)
    data = DataConfig(sources=(GIVEN,), batch_documents=1, max_document_tokens=1)
    return LengthSource(name=GIVEN, data=data, table=table)
