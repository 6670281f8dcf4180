"""Check whether measured costs hold for a model and a layout, name what is missing, and complete it from a cluster.

Seconds a layer belong to one shape of layer in one precision; costs of another shape are refused. The number of
layers, names, tied embeddings, windows and what memory is counted are not part of the shape.

    layers      measured with matrices split over tp devices, the seconds include that group's transfers and say nothing
                about another tp. Measured on whole matrices (tp 1), any tp can be costed
    links       a link is known between as many devices as took part in the measurement

A run measures what is missing; a plan without devices takes links from its cluster and says so. Where a run may
change its layout, one measured link stands for those that another layout of the same processes needs.
"""

from collections.abc import Iterator, Mapping
from typing import Literal

import msgspec

from evenload.cost.coefficients import CostCoefficients, MeasuredOn
from evenload.errors import ConfigError
from evenload.types.cluster import ClusterSpec, LinkSpec
from evenload.types.layout import ParallelLayout
from evenload.types.model import ModelSpec

Missing = Literal["layers", "pipeline link", "reduction link", "group link"]
"""A part of costs that a layout needs: seconds of layers; links between pipeline stages, over which gradients are
reduced, and inside a tensor- or context-parallel group."""

_NOT_SHAPE = {
    *("name", "num_layers", "tied_embeddings", "sliding_windows", "position_rows"),
    *("attention_workspace", "ordered_attention", "averaged_weights"),
}
_LINK_OF: Mapping[Missing, str] = {
    "pipeline link": "the transfer between pipeline stages",
    "reduction link": "the reduction of gradients",
    "group link": "the transfer between devices that share matrices or documents",
}


def shape_differences(measured: ModelSpec, planned: ModelSpec) -> dict[str, tuple[object, object]]:
    """Return the fields in which the layers of two models differ, with both values."""
    one, other = msgspec.structs.asdict(measured), msgspec.structs.asdict(planned)
    return {name: (one[name], other[name]) for name in one if name not in _NOT_SHAPE and one[name] != other[name]}


def require_measured_on(coefficients: CostCoefficients, model: ModelSpec, origin: str) -> MeasuredOn:
    """Refuse costs of another model.

    Args:
        origin: where the costs come from, for messages, such as "cost file cost.json".

    Raises:
        ConfigError: they do not say what they were measured on, or layers of another shape or precision were measured.
    """
    measured = coefficients.measured_on
    if measured is None:
        raise ConfigError(
            f"{origin} does not say on which model and layout it was measured (no 'measured_on'), so it could belong "
            "to any; measure again: evenload profile writes one, and so does a run of evenload train without "
            "train.cost_file, into its output_dir"
        )
    differing = shape_differences(measured.model, model)
    if differing:
        fields = ", ".join(f"{name} {here} there and {there} here" for name, (here, there) in differing.items())
        raise ConfigError(
            f"{origin} was measured on model {measured.model.name} and this is {model.name}, whose layers differ: "
            f"{fields}; give a cost file of {model.name}, or none"
        )
    return measured


def in_measured_precision(model: ModelSpec, coefficients: CostCoefficients) -> ModelSpec:
    """Return the model in the precision that was measured, where nobody says in which it will be trained."""
    measured = coefficients.measured_on
    if measured is None:
        return model
    return msgspec.structs.replace(model, bytes_per_element=measured.model.bytes_per_element)


def missing_costs(coefficients: CostCoefficients, layout: ParallelLayout) -> tuple[Missing, ...]:
    """List what a layout needs and the costs do not have; () = they hold for it."""
    measured = coefficients.measured_on
    missing: list[Missing] = ["layers"] if measured is not None and measured.tp not in (1, layout.tp) else []
    for part, prefix, span in _used_links(layout):
        is_known = getattr(coefficients, f"{prefix}_bandwidth_bytes_per_s") is not None
        if not is_known or (measured is not None and span > measured.world_size):
            missing.append(part)
    if layout.cp * layout.tp > 1 and coefficients.group_link_or_none(layout.cp * layout.tp, 1) is None:
        missing.append("group link")
    return tuple(missing)


def require_covered(coefficients: CostCoefficients, model: ModelSpec, layout: ParallelLayout, origin: str) -> None:
    """Refuse costs that are of another model or do not cover the layout.

    Raises:
        ConfigError: names the model and the differing fields, or what is missing.
    """
    measured = require_measured_on(coefficients, model, origin)
    missing = missing_costs(coefficients, layout)
    if not missing:
        return
    if "layers" in missing:
        raise ConfigError(_other_tp(measured, layout, origin))
    parts = " and ".join(_LINK_OF[part] for part in missing)
    raise ConfigError(
        f"{origin} was measured on {_sizes(measured)} and does not cover layout {layout.describe()}: {parts} was not "
        "measured between so many devices; measure on this layout, or train on the measured one"
    )


def completed_from_cluster(
    coefficients: CostCoefficients, model: ModelSpec, layout: ParallelLayout, cluster: ClusterSpec, origin: str
) -> tuple[CostCoefficients, tuple[str, ...]]:
    """Return costs whose missing links are the cluster's, and what was taken, one sentence each.

    Links known between fewer devices than the layout has stand for all that lie in one node of the cluster.

    Raises:
        ConfigError: another model, or seconds of layers under another tp.
    """
    measured = require_measured_on(coefficients, model, origin)
    if "layers" in missing_costs(coefficients, layout):
        raise ConfigError(_other_tp(measured, layout, origin))
    # What was measured inside a node holds for the whole node.
    known_span = max(measured.world_size, cluster.devices_per_node)
    changes: dict[str, object] = {"devices_per_node": max(coefficients.devices_per_node, cluster.devices_per_node)}
    notes = []

    def take(part: Missing, span_devices: int, link: LinkSpec) -> LinkSpec:
        notes.append(
            f"{_LINK_OF[part]} over {span_devices} devices was not measured ({origin}: {_sizes(measured)}): taken from "
            f"cluster {cluster.name}, {link.bandwidth_bytes_per_s / 1e9:.3g} GB/s and {link.latency_s * 1e6:.3g} us"
        )
        return link

    for part, prefix, span in _used_links(layout):
        if getattr(coefficients, f"{prefix}_bandwidth_bytes_per_s") is None or span > known_span:
            of_cluster = (
                cluster.device_link(span)
                if part == "pipeline link"
                else cluster.group_link(max(layout.data_sizes), layout.tp)
            )
            changes |= _link_fields(prefix, take(part, span, of_cluster))
    # Replicas may share documents, and a switch of layout may move layers between any two devices.
    if layout.world_size > 1 and coefficients.intra_node is None:
        changes["intra_node"] = take("group link", min(layout.world_size, cluster.devices_per_node), cluster.intra_node)
    if layout.world_size > known_span and coefficients.inter_node is None:
        changes["inter_node"] = take("group link", layout.world_size, cluster.inter_node)
        changes["nics_per_node"] = cluster.num_nics
    host_link = cluster.host_link()
    if coefficients.host_link is None and host_link is not None:
        changes["host_link"] = host_link
        notes.append(
            f"copies to host memory were not measured ({origin}): taken from cluster {cluster.name}, "
            f"{host_link.bandwidth_bytes_per_s / 1e9:.3g} GB/s"
        )
    return msgspec.structs.replace(coefficients, **changes), tuple(notes)


def completed_between_layouts(
    coefficients: CostCoefficients, layout: ParallelLayout
) -> tuple[CostCoefficients, tuple[str, ...]]:
    """Return costs of another layout of the processes that were measured, and what was taken for what, one sentence
    each.

    A message from a process to another takes what it takes, whatever it is for: the transfer between stages, or where
    there are none a step of the ring of gradients, or one inside a group, stands for those that were not measured.

    Raises:
        ConfigError: nothing was sent between processes when the costs were measured, or they are of fewer processes.
    """
    measured = coefficients.measured_on
    if measured is not None and layout.world_size > measured.world_size:
        raise ConfigError(
            f"costs of {coefficients.device} were measured on {_sizes(measured)} and do not speak for "
            f"{layout.world_size} processes; measure on so many"
        )
    p2p, reduction = coefficients.p2p_bandwidth_bytes_per_s, coefficients.reduce_bandwidth_bytes_per_s
    known: dict[str, LinkSpec] = {}
    if p2p is not None:
        known["transfers between stages"] = LinkSpec(bandwidth_bytes_per_s=p2p, latency_s=coefficients.p2p_latency_s)
    if reduction is not None:
        ring = LinkSpec(bandwidth_bytes_per_s=reduction, latency_s=coefficients.reduce_latency_s)
        known["the reduction of gradients"] = ring
    if coefficients.intra_node is not None:
        known["transfers inside groups"] = coefficients.intra_node
    if layout.world_size == 1:
        return coefficients, ()
    if not known:
        raise ConfigError(
            f"costs of {coefficients.device} know no link between processes, so no other layout can be priced; measure "
            "on several processes (evenload profile --layout, or a run without train.cost_file)"
        )
    origin, link = next(iter(known.items()))
    changes: dict[str, object] = {}
    lacking = []
    for name, prefix in (("transfers between stages", "p2p"), ("the reduction of gradients", "reduce")):
        if name not in known:
            changes |= _link_fields(prefix, link)
            lacking.append(name)
    if coefficients.intra_node is None:
        # A switch of layout moves layers between any two processes.
        changes["intra_node"] = link
        changes["devices_per_node"] = max(coefficients.devices_per_node, layout.world_size)
        lacking.append("transfers inside groups and of a switch of layout")
    notes = tuple(f"{name} not measured: taken from {origin}, between the same processes" for name in lacking)
    return msgspec.structs.replace(coefficients, **changes), notes


def _used_links(layout: ParallelLayout) -> Iterator[tuple[Missing, str, int]]:
    """Between stages and between replicas, where the layout has several: with the devices that the link spans."""
    if layout.num_stages > 1:
        yield "pipeline link", "p2p", layout.world_size
    if (copies := max(layout.data_sizes)) > 1:
        yield "reduction link", "reduce", copies * layout.tp


def _link_fields(prefix: str, link: LinkSpec) -> dict[str, object]:
    """Return the fields of `CostCoefficients` that say a link; gathers go over that of reductions."""
    fields: dict[str, object] = {
        f"{prefix}_bandwidth_bytes_per_s": link.bandwidth_bytes_per_s,
        f"{prefix}_latency_s": link.latency_s,
    }
    return fields | ({"gather_link": None} if prefix == "reduce" else {})


def _sizes(measured: MeasuredOn) -> str:
    sizes = [f"{axis}={getattr(measured, axis)}" for axis in ("dp", "cp", "pp", "tp") if getattr(measured, axis) > 1]
    return f"layout {','.join(sizes)}" if sizes else "one device"


def _other_tp(measured: MeasuredOn, layout: ParallelLayout, origin: str) -> str:
    return (
        f"{origin} was measured under tp={measured.tp}, and the seconds of its layers include that group's transfers, "
        f"so they say nothing about layout {layout.describe()}; plan with tp={measured.tp}, or give a cost file "
        f"measured under tp=1 or tp={layout.tp}"
    )
