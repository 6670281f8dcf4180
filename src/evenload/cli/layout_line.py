"""What a run says in words when its layout changes: from what to what, why, what it costs and what it is to win."""

from evenload.report.layout_table import format_action
from evenload.report.units import format_seconds
from evenload.types.layout_decision import LayoutDecision
from evenload.types.scaled_units import format_bytes


def layout_line(decision: LayoutDecision) -> str:
    """One line about a switch; "" where the layout stays."""
    if not decision.is_switch:
        return ""
    measured = ""
    if decision.measured_switch_s is not None:
        measured = f", measured {format_seconds(decision.measured_switch_s)}"
    moved = "" if decision.moved_bytes is None else f"{format_bytes(decision.moved_bytes)} moved, "
    steps = f"{decision.known_steps} known step{'s' if decision.known_steps > 1 else ''}"
    gain = "the batch did not fit" if decision.gain_s is None else f"{format_seconds(decision.gain_s)} gained"
    return (
        f"layout {decision.before} -> {decision.layout} before step {decision.step}, {format_action(decision)}: "
        f"{decision.why}; {moved}switch predicted {format_seconds(decision.switch_s)}{measured}; predicted over "
        f"{steps}: {gain}"
    )
