"""What a measured cost file is, in a line: what was measured, when, on what, and how far its predictions were off."""

import re

from evenload.cost.coefficients import CostCoefficients
from evenload.report.units import format_percent
from evenload.types.cluster import ClusterSpec

_PRECISIONS = {2: "bfloat16", 4: "float32", 8: "float64"}


def measured_line(costs: CostCoefficients) -> str:
    """Of costs that say what they were measured on."""
    measured, profile = costs.measured_on, costs.profile
    assert measured is not None, "read by `cost.coverage.require_measured_on`"
    sizes = ",".join(f"{axis}={getattr(measured, axis)}" for axis in ("dp", "cp", "pp", "tp"))
    precision = _PRECISIONS[measured.model.bytes_per_element]
    what = f"measured on {costs.device}, model {measured.model.name} in {precision}, layout {sizes}"
    if profile is None:
        return f"{what}, in seconds at the start of a run (evenload profile takes minutes and says how far it is off)"
    parts = [
        f"{what}, on {profile.date[:10]} by evenload {profile.versions.get('evenload', '?')}",
        f"{profile.forward.packs} packs x {profile.passes} passes in {profile.seconds / 60:.1f} min, "
        f"{profile.outliers:,} of {profile.timings:,} timings far off",
        "packs that the fit had not seen were off by "
        + " and ".join(
            f"{format_percent(error.median)} (median) {format_percent(error.p90)} (90 % of them) {direction}"
            for direction, error in (("forward", profile.forward), ("backward", profile.backward))
        ),
    ]
    if costs.is_changed:
        parts.append("CHANGED after it was measured, so these errors may no longer hold")
    return "; ".join(parts)


def other_device_line(costs: CostCoefficients, cluster: ClusterSpec) -> str:
    """That seconds are of another device than the cluster's, as far as names tell; "" where they agree."""
    # "H100" of "H100-80GB", which its driver calls "NVIDIA H100 80GB HBM3".
    if re.split(r"[-\s]", cluster.device.name.lower())[0] in costs.device.lower():
        return ""
    return (
        f"the seconds were measured on {costs.device} and are taken as they are; cluster {cluster.name} has "
        f"{cluster.device.name}, so if that is another device, step times are not of it"
    )


def cost_file_warnings(costs: CostCoefficients, file: str, device_name: str) -> list[str]:
    """What may make predictions of a run wrong though its `train.cost_file` is of its model and layout."""
    lines = []
    if costs.device != device_name:
        lines.append(
            f"costs measured on {costs.device} (train.cost_file {file}), this is {device_name}: predicted seconds are "
            "of the former"
        )
    if costs.is_changed:
        lines.append(
            f"train.cost_file {file} was changed after evenload profile had measured it: its errors may no longer hold"
        )
    return lines
