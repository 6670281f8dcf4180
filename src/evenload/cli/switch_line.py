"""What a run says of the layouts that it may take, and of every change from one to another."""

from evenload.report.units import format_seconds
from evenload.runtime.comm.mesh import Meshes
from evenload.runtime.stages.live_stages import Switch, Twins
from evenload.types.counted import counted
from evenload.types.layout_decision import LayoutDecision
from evenload.types.scaled_units import format_bytes


def groups_line(meshes: Meshes, *, are_declared: bool) -> str:
    """At the start; "" for a run of one layout.

    Args:
        are_declared: in `plan.layouts`; else the run chose them.
    """
    if len(meshes.layouts) == 1:
        return ""
    named = ", ".join(layout.describe() for layout in meshes.layouts)
    chosen = "" if are_declared else ", as plan.layouts names none (plan.options.flexpipe.most_layouts, most_groups)"
    return f"layouts that the run may take: {named}{chosen} | {counted(meshes.num_groups, 'process group')}"


def twins_line(twins: Twins | None, budget_bytes: int | None) -> str:
    """At the start; "" where ranks have nothing to share."""
    if twins is None:
        return ""
    if twins.reason:
        return f"shared memory: none, what moves between layouts is sent ({twins.reason})"
    limit = "no limit" if budget_bytes is None else f"limit {format_bytes(budget_bytes)}"
    left_out = twins.num_pieces - twins.num_shared
    rest = f"; {left_out} do not fit and are sent (plan.twin_bytes)" if left_out else ""
    return (
        f"shared memory: {twins.num_shared} of {twins.num_pieces} pieces of the model, at most "
        f"{format_bytes(twins.num_bytes)} of a machine ({limit}){rest}"
    )


def switch_line(step: int, switch: Switch, decision: LayoutDecision | None = None) -> str:
    """Of one change, and where it comes from if not from the step's decision."""
    resumed = ""
    if decision is not None and decision.before != switch.before:
        resumed = f"; processes start in {switch.before}, the steps before the checkpoint ran in {decision.before}"
    return (
        f"layout {switch.before} -> {switch.after} before step {step}: training waited "
        f"{format_seconds(switch.stall_s)} (predicted {format_seconds(switch.predicted_stall_s)}) for "
        f"{format_bytes(switch.weight_bytes)} of weights, {format_seconds(switch.wait_s)} more for "
        f"{format_bytes(switch.state_bytes)} of optimizer state behind the step{resumed}"
    )
