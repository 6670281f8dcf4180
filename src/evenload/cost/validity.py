"""Check whether measured costs hold for a model and a layout, name what is missing, and complete it from a cluster.

Seconds a layer belong to one shape of layer in one precision. Measured with matrices split over tp devices they
include that group's transfers and hold for that tp alone; measured on whole matrices (tp 1) they hold for any tp. A
link is known between as many devices as took part in the measurement. Where a run may change its layout, one measured
link stands for those that another layout of the same processes needs.
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

_LINK_OF: Mapping[Missing, str] = {
    "pipeline link": "the transfer between pipeline stages",
    "reduction link": "the reduction of gradients",
    "group link": "the transfer between devices that share matrices or documents",
}


def require_measured_on(coefficients: CostCoefficients, model: ModelSpec, origin: str) -> MeasuredOn:
    """Refuse costs of another model, or of no known one, by a `ConfigError`; return what they were measured on.
    `origin` says in messages where they come from, such as "cost file cost.json"."""
    measured = coefficients.measured_on
    if measured is None:
        raise ConfigError(
            f"{origin} does not say on which model and layout it was measured (no 'measured_on'); measure again: "
            "evenload profile writes one, and so does a run of evenload train without train.cost_file, into its "
            "output_dir"
        )
    there, here = _shape(measured.model), _shape(model)
    differing = [name for name in there if there[name] != here[name]]
    if differing:
        fields = ", ".join(f"{name} {there[name]} there and {here[name]} here" for name in differing)
        raise ConfigError(
            f"{origin} was measured on model {measured.model.name} and this is {model.name}, whose layers differ: "
            f"{fields}; give a cost file of {model.name}, or none"
        )
    return measured


def _shape(model: ModelSpec) -> dict[str, object]:
    """Return what seconds of layers, embedding and head belong to, by name for messages: not windows, which pairs
    count, nor how many layers there are of a kind, nor norms."""
    names = "hidden_size", "vocab_size", "causal", "bytes_per_element"
    kinds = sorted({kind.describe() for kind in model.kinds})
    return {name: getattr(model, name) for name in names} | {"layers": " and ".join(kinds)}


def in_measured_precision(model: ModelSpec, coefficients: CostCoefficients) -> ModelSpec:
    """Return the model in the precision that was measured, for where it is not known in which it will be trained."""
    measured = coefficients.measured_on
    element = model.bytes_per_element if measured is None else measured.model.bytes_per_element
    return msgspec.structs.replace(model, bytes_per_element=element)


def missing_costs(coefficients: CostCoefficients, layout: ParallelLayout) -> tuple[Missing, ...]:
    """List what a layout needs and the costs do not have; () = they hold for it."""
    measured = coefficients.measured_on
    missing: list[Missing] = ["layers"] if measured is not None and measured.tp not in (1, layout.tp) else []
    for part, prefix, span in _used_links(layout):
        is_known = coefficients.link_or_none(prefix) is not None
        if not is_known or (measured is not None and span > measured.world_size):
            missing.append(part)
    if layout.cp * layout.tp > 1 and coefficients.group_link_or_none(layout.cp * layout.tp, 1) is None:
        missing.append("group link")
    return tuple(missing)


def require_complete(coefficients: CostCoefficients, model: ModelSpec, layout: ParallelLayout, origin: str) -> None:
    """Refuse costs of another model, or that do not cover the layout, by a `ConfigError` that names what is missing."""
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


def fill_from_cluster(
    coefficients: CostCoefficients, model: ModelSpec, layout: ParallelLayout, cluster: ClusterSpec, origin: str
) -> tuple[CostCoefficients, tuple[str, ...]]:
    """Return costs whose missing links are the cluster's, and which links these are, one sentence each. Links known
    between fewer devices than the layout has stand for all that lie in one node. Raises `ConfigError` for another model
    or tp."""
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
        if coefficients.link_or_none(prefix) is None or span > known_span:
            data_link = cluster.group_link(max(layout.data_sizes), layout.tp)
            changes |= link_fields(
                prefix, take(part, span, cluster.device_link(span) if prefix == "p2p" else data_link)
            )
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


def fill_between_layouts(
    coefficients: CostCoefficients, layout: ParallelLayout
) -> tuple[CostCoefficients, tuple[str, ...]]:
    """Return costs of another layout of the processes that were measured, and which link stands for which, one sentence
    each: a message takes the same time whatever it is for, so the transfer between stages, or else a step of the ring
    of gradients, or one inside a group, stands for those that were not measured.

    Raises:
        ConfigError: nothing was sent between processes when the costs were measured, or they are of fewer processes.
    """
    measured = coefficients.measured_on
    if measured is not None and layout.world_size > measured.world_size:
        raise ConfigError(
            f"costs of {coefficients.device} were measured on {_sizes(measured)} and do not hold for "
            f"{layout.world_size} processes; measure on so many"
        )
    if layout.world_size == 1:
        return coefficients, ()
    stages, gradients = "transfers between stages", "the reduction of gradients"
    links = {
        stages: coefficients.link_or_none("p2p"),
        gradients: coefficients.link_or_none("reduce"),
        "transfers inside groups": coefficients.intra_node,
    }
    origin, link = next(((name, link) for name, link in links.items() if link is not None), ("", None))
    if link is None:
        raise ConfigError(
            f"costs of {coefficients.device} know no link between processes, so no other layout can be priced; measure "
            "on several processes (evenload profile --layout, or a run without train.cost_file)"
        )
    changes: dict[str, object] = {}
    missing = [name for name in (stages, gradients) if links[name] is None]
    for name in missing:
        changes |= link_fields("p2p" if name == stages else "reduce", link)
    if coefficients.intra_node is None:
        # A switch of layout moves layers between any two processes.
        changes["intra_node"] = link
        changes["devices_per_node"] = max(coefficients.devices_per_node, layout.world_size)
        missing.append("transfers inside groups and of a switch of layout")
    notes = tuple(f"{name} not measured: taken from {origin}, between the same processes" for name in missing)
    return msgspec.structs.replace(coefficients, **changes), notes


def _used_links(layout: ParallelLayout) -> Iterator[tuple[Missing, Literal["p2p", "reduce"], int]]:
    """Yield the links between stages and between replicas, where there are several, and how many devices each spans."""
    if layout.num_stages > 1:
        yield "pipeline link", "p2p", layout.world_size
    if (copies := max(layout.data_sizes)) > 1:
        yield "reduction link", "reduce", copies * layout.tp


def link_fields(prefix: str, link: LinkSpec) -> dict[str, object]:
    """Return the fields of `CostCoefficients` that hold a link; all-gathers go over that of reductions."""
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
        f"{origin} was measured under tp={measured.tp}, whose transfers are in the seconds of its layers, and does not "
        f"hold for layout {layout.describe()}; plan with tp={measured.tp}, or give a cost file measured under tp=1 or "
        f"tp={layout.tp}"
    )
