"""What a run says in words when its layout changes: from what to what, why, and what that is to cost and to win.

What the switch took is said by `cli.switch_line`.
"""

from collections.abc import Sequence

from evenload.cost.coefficients import CostCoefficients
from evenload.cost.coverage import completed_between_layouts
from evenload.report.table import format_action
from evenload.report.units import format_seconds
from evenload.types.layout import ParallelLayout
from evenload.types.layout_decision import LayoutDecision


def layout_line(decision: LayoutDecision) -> str:
    """One line about a switch; "" where the layout stays."""
    if not decision.is_switch:
        return ""
    said = (
        f"{decision.before} -> {decision.layout} before step {decision.step}, {format_action(decision)}: {decision.why}"
    )
    switch_s = format_seconds(decision.switch_s)
    if decision.gain_s is None:
        return f"layout {said}; forced by memory, whatever it costs; predicted: {switch_s} for the switch"
    steps = f"{decision.known_steps} known step{'s' if decision.known_steps > 1 else ''}"
    gain = f"{format_seconds(decision.gain_s)} gained over {steps}"
    return f"layout {said}; predicted: {switch_s} for the switch, {gain}"


def other_layouts_lines(costs: CostCoefficients, layouts: Sequence[ParallelLayout]) -> tuple[str, ...]:
    """At the start: what was not measured and is taken from something else where the layout changes."""
    if len(layouts) == 1:
        return ()
    notes = [note for layout in layouts for note in completed_between_layouts(costs, layout)[1]]
    return tuple(f"costs of other layouts: {note}" for note in dict.fromkeys(notes))
