"""What the terminal shows of decisions about the layout: FlexPipe's conditions step by step, quiet steps in one row."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from evenload.report.units import format_seconds
from evenload.types.layout_decision import LayoutDecision

CASES = "①②③④"
"""Of FlexPipe's Fig. 7."""


def format_conditions(decision: LayoutDecision) -> str:
    """The conditions that hold by their letters, a dot for every other: "A · C ·"."""
    held = (
        decision.fits,
        decision.switching_is_slower,
        decision.fits_saving,
        decision.switching_is_slower_than_saving,
    )
    return " ".join(letter if holds else "·" for letter, holds in zip("ABCD", held, strict=True))


def format_action(decision: LayoutDecision) -> str:
    """The case of Fig. 7 and what is done: "④ shrink"."""
    waits = ", waits" if decision.is_patient or decision.later_steps else ""
    return f"{CASES[decision.case - 1]} {decision.action}{waits}"


def format_predicted(seconds: float | None) -> str:
    """Predicted seconds, or that the batch does not fit."""
    return "does not fit" if seconds is None else format_seconds(seconds)


@dataclass(frozen=True)
class LayoutTable:
    """A rich renderable: every decision of a run or an evaluation.

    Steps in a row in which the same was done for the same conditions are one row, with the last one's seconds.
    """

    decisions: Sequence[LayoutDecision]
    title: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        title = Text(self.title) if self.title else None
        table = Table(title=title, title_justify="left", header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
        for heading in ("step", "layout", "A B C D", "action"):
            table.add_column(heading, no_wrap=True)
        for heading in ("T(keep)", "T(save)", "T(new)", "T(switch)"):
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("why")
        for rows in _runs(self.decisions):
            first, last = rows[0], rows[-1]
            table.add_row(
                f"{first.step}" if first is last else f"{first.step}-{last.step}",
                Text(last.layout),
                format_conditions(last),
                format_action(last),
                format_predicted(last.keep_s),
                _saving_cell(last),
                format_predicted(last.new_s) if last.other else "",
                _switch_cell(last),
                Text(last.why),
                style="bold" if last.is_switch else None,
            )
        yield table
        yield Text(
            "A the layout holds the batch, B switching is slower, C it holds it by recomputing or offloading, D "
            "switching is slower than that; ① kept ② kept, saving memory ③ switched to fit ④ switched to be faster; "
            "T(save) by documents, or (layers) by layers that recompute for all of them; seconds are predicted, over "
            "the known steps"
        )


def _saving_cell(decision: LayoutDecision) -> str:
    by_layers, by_documents = decision.save_layers_s, decision.save_documents_s
    has_layers = by_layers is not None and (by_documents is None or by_layers < by_documents)
    return format_predicted(decision.save_s) + (" (layers)" if has_layers else "")


def _switch_cell(decision: LayoutDecision) -> str:
    if not decision.other:
        return ""
    measured = decision.measured_switch_s
    return format_seconds(decision.switch_s) + ("" if measured is None else f" ({format_seconds(measured)} measured)")


def _runs(decisions: Sequence[LayoutDecision]) -> Iterator[list[LayoutDecision]]:
    def kind(decision: LayoutDecision) -> object:
        apart = decision.step if decision.is_switch else None
        return decision.layout, format_conditions(decision), format_action(decision), apart

    for _, rows in itertools.groupby(decisions, kind):
        yield list(rows)
