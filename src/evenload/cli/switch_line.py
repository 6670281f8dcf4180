"""What a run says of the layouts that it may take, and of every change from one to another."""

from evenload.report.units import format_seconds
from evenload.runtime.comm.mesh import Meshes
from evenload.runtime.stages.live_stages import Switch
from evenload.types.scaled_units import format_bytes


def groups_line(meshes: Meshes) -> str:
    """At the start; "" for a run of one layout."""
    if len(meshes.layouts) == 1:
        return ""
    named = ", ".join(layout.describe() for layout in meshes.layouts)
    return f"layouts that the run may take: {named} | {meshes.num_groups} process groups"


def switch_line(step: int, switch: Switch) -> str:
    """Of one change."""
    return (
        f"layout {switch.before} -> {switch.after} before step {step}: training waited "
        f"{format_seconds(switch.stall_s)} (predicted {format_seconds(switch.predicted_stall_s)}) for "
        f"{format_bytes(switch.weight_bytes)} of weights, {format_seconds(switch.wait_s)} more for "
        f"{format_bytes(switch.state_bytes)} of optimizer state behind the step"
    )
