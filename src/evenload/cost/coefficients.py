"""Hold what a device and its links cost, in seconds and bytes: `CostCoefficients`, a cost file in JSON.

Data sheets (`cost.analytic`) and measurements fill the same struct. What was not measured is absent, not free;
`measured_on` names what it holds for (`cost.validity`), `Profile` how it was measured. A pack on one layer takes

    linear_s_per_token · tokens + attention_s_per_pair · pairs + prefix_s_per_token · prefix + slice_s · slices + pack_s

where `prefix` is the tokens before each slice, summed over slices (`start`, at most the window): keys that a slice
reads, and gradients of K and V that it adds to. `pairs` counts whole tiles (WLB-LLM §5.3). `pack_s` also holds the
loss of small matrix products: at the share n / (n + n_half) of their best speed, n tokens take `c·n + c·n_half`. A
pack on a stage takes at least as long as the host queues its kernels, `host_slice_s · slices + host_pack_s`.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from evenload.errors import ConfigError, unreadable
from evenload.types.base import Frozen, require_at_least_one
from evenload.types.cluster import LinkSpec, device_share, group_link
from evenload.types.model import ModelSpec, model_tree

# Above these, predicted seconds are off by more than what plans decide by. A quiet machine stays far below.
_MOST_WAITED_SHARE = 0.15
_MOST_SPREAD = 0.5


class Noise(Frozen):
    """Record how busy other programs kept the machine while it was timed; of several ranks, the most that any had.

    Args:
        waited_share: share of the time in which the busiest thread was ready and had no core, beyond what the run's
            own processes take from each other.
        spread: by how much the mean of repeated timings is above the fastest, over all packs together.
    """

    waited_share: float
    spread: float

    @property
    def is_noisy(self) -> bool:
        return self.size > 1

    @property
    def size(self) -> float:
        """Return a number that grows with the noise; above 1 the timings are not reliable."""
        return max(self.waited_share / _MOST_WAITED_SHARE, self.spread / _MOST_SPREAD)

    def describe(self) -> str:
        return (
            f"ranks waited {self.waited_share:.0%} of the time for a core, repeats spread {self.spread:.0%} above the "
            "fastest"
        )


class MeasuredOn(Frozen):
    """Record what coefficients were measured on.

    Args:
        model: whose layers were timed, in the precision that they computed in.
        dp, cp, pp, tp: sizes of the layout that ran; links between more devices than those are not known.
        noise: of the machine meanwhile; None = not known.
        is_cut_short: `train.calibration_max_s` left layers, packs or repeats out.
    """

    model: ModelSpec
    dp: int
    cp: int
    pp: int
    tp: int
    noise: Noise | None = None
    is_cut_short: bool = False

    def __post_init__(self) -> None:
        require_at_least_one("measured_on: ", self, "dp", "cp", "pp", "tp")

    @property
    def world_size(self) -> int:
        return self.dp * self.cp * self.pp * self.tp


class FitError(Frozen):
    """Hold |predicted / measured - 1| of `packs` that were left out of the fit, in `folds` folds; 0.05 = 5 %."""

    packs: int
    folds: int
    median: float
    p90: float

    def __post_init__(self) -> None:
        if not (0 <= self.median <= self.p90):
            raise ConfigError(f"profile: errors of a fit are median {self.median} and p90 {self.p90}, must ascend")


class TimedPack(Frozen):
    """Hold one pack of the grid on one layer: its slices as (start, stop, how many documents have this slice), the
    median over passes and ranks, and what a fit without this pack predicts."""

    direction: Literal["forward", "backward"]
    slices: tuple[tuple[int, int, int], ...]
    measured_s: float
    left_out_s: float


class Profile(Frozen):
    """Record how coefficients were measured; planning reads none of it.

    Args:
        date: of the end, ISO 8601 in UTC; versions: of the libraries that compute, by name.
        dtype, attention: of the layers that were timed, and their attention backend.
        layers: that were timed on every rank; seconds in the cost file are of one.
        passes: over the whole grid; seconds: that measuring took.
        outliers, timings: repeats more than 5 deviations from the median of their pack, of so many.
        forward, backward: the fit's error on packs that it had not seen; packs: the grid with its residuals.
        activation_bytes: of one token on one layer, by policy, counted.
        held_bytes: that the device's allocator reserved, or by which the process grew (CPU; 0 = not known), at the peak
            of the longest round; counted_bytes: that its tensors needed.
        has_overlap: it measured `CostCoefficients.overlap`; else a run measures it.
        digest: of the coefficients as they were measured, to notice a later change by hand.
    """

    date: str
    versions: dict[str, str]
    dtype: str
    attention: str
    layers: int
    passes: int
    seconds: float
    outliers: int
    timings: int
    forward: FitError
    backward: FitError
    packs: tuple[TimedPack, ...]
    activation_bytes: dict[str, int]
    held_bytes: int
    counted_bytes: int
    has_overlap: bool = False
    digest: str = ""


def digest_of(coefficients: msgspec.Struct) -> str:
    """Hash all fields that differ from their defaults, except the digest itself and what a run adds."""
    tree = _set_fields(coefficients)
    for of_run in ("context_exchange", "overlap_reduction", "overlap_gather", "copies"):
        tree.pop(of_run, None)
    if "profile" in tree:
        tree["profile"].pop("digest", None)
        if not tree["profile"].get("has_overlap"):
            tree.pop("overlap", None)
    return hashlib.sha256(msgspec.json.encode(tree, order="deterministic")).hexdigest()[:16]


def _set_fields(value: Any) -> Any:
    if not isinstance(value, msgspec.Struct):
        return [_set_fields(one) for one in value] if isinstance(value, tuple) else value
    fields = msgspec.structs.fields(value)
    return {f.name: _set_fields(own) for f in fields if (own := getattr(value, f.name)) != f.default}


class CopySpec(Frozen):
    """Hold what copies between the ranks of a machine take when a run changes its layout, as measured.

    Args:
        rank_bytes_per_s: of one rank that reads alone.
        machine_bytes_per_s: of all ranks of a machine together when all read at once; they share its cores and memory.
        taken_bytes_per_s: the same, of memory that is touched for the first time.
        fixed_s: of a switch, whatever moves.
        layer_s: for each layer that a rank holds in the new layout.
        gained_s, left_s: for each piece of the model that a rank gains, on top of its bytes, and that it gives up.
        num_ranks: of the run that measured; 0 = unknown.

    Raises:
        ConfigError: a rate that is not above 0, or negative seconds or ranks.
    """

    rank_bytes_per_s: float
    machine_bytes_per_s: float
    taken_bytes_per_s: float
    fixed_s: float
    layer_s: float = 0.0
    gained_s: float = 0.0
    left_s: float = 0.0
    num_ranks: int = 0

    def __post_init__(self) -> None:
        for field, value in msgspec.structs.asdict(self).items():
            is_rate = field.endswith("bytes_per_s")
            if not (value > 0 if is_rate else value >= 0):
                raise ConfigError(f"copies of a cost file: {field} is {value}, must be {'> 0' if is_rate else '>= 0'}")

    def arranging_seconds(self, num_layers: int, num_gained: int, num_left: int) -> float:
        """Return the seconds of a switch besides its bytes, on a rank that then holds so many layers, and gains and
        gives up so many pieces."""
        return self.fixed_s + self.layer_s * num_layers + self.gained_s * num_gained + self.left_s * num_left

    def seconds(self, read_bytes: Mapping[int, float], ranks_per_machine: int, tp: int) -> float:
        """Return the seconds until every rank has read what it lacks (bytes by rank, of one tensor-parallel rank; each
        of the `tp` reads as much at the same time), without `arranging_seconds`."""
        machines: dict[int, float] = {}
        for rank, count in read_bytes.items():
            machines[rank // ranks_per_machine] = machines.get(rank // ranks_per_machine, 0.0) + count
        alone_s = max(read_bytes.values(), default=0.0) / self.rank_bytes_per_s
        return max(alone_s, tp * max(machines.values(), default=0.0) / self.machine_bytes_per_s)


class PassCoefficients(Frozen):
    """Hold the seconds of one direction (forward or backward) on ONE layer.

    Args:
        linear_s_per_token: all matrix products and elementwise work of one token.
        attention_s_per_pair: one query attending to one key, all heads.
        prefix_s_per_token: one token of the prefix of a slice, on top of its pairs.
        slice_s: constant of every slice (document piece) in a pack.
        pack_s: constant of every pack: kernel launches and the n/(n+n_half) loss of matrix products.
        host_slice_s, host_pack_s: until the host has queued a slice's, and a pack's, part of this layer on the device;
            0 where the device is the host, or it was not measured.
    """

    linear_s_per_token: float
    attention_s_per_pair: float
    prefix_s_per_token: float = 0.0
    slice_s: float = 0.0
    pack_s: float = 0.0
    host_slice_s: float = 0.0
    host_pack_s: float = 0.0


class OverlapCost(Frozen):
    """Hold how collectives and compute slow each other while both run: reduce-scatters of gradients during backwards,
    all-gathers of weights during forwards.

    Args:
        communication_slowdown: seconds of a collective during compute over its seconds alone, above 0.
        compute_slowdown: share of the time of such a collective that compute loses, 0..1; near 1 where cores that
            compute move the bytes. The default is assumed, for devices with copy engines.
    """

    communication_slowdown: float = 1.0
    compute_slowdown: float = 0.2

    def __post_init__(self) -> None:
        if not self.communication_slowdown > 0:
            raise ConfigError(f"overlap: communication_slowdown is {self.communication_slowdown}, must be above 0")
        if not 0 <= self.compute_slowdown <= 1:
            raise ConfigError(f"overlap: compute_slowdown is {self.compute_slowdown}, must be in 0..1")

    @property
    def pays(self) -> bool:
        """Say whether an overlapped collective costs less than it takes alone."""
        return self.communication_slowdown * self.compute_slowdown < 1


class CostCoefficients(Frozen):
    """Hold what computing and communicating costs. A link of None is not known, and layouts that need it are refused.

    Args:
        source: "analytic" (from data sheets) or "calibrated" (measured on the device).
        device: name shown to users; peak_flops_per_s: of one device, which MFU is a share of.
        forward, backward: seconds per layer.
        attention_tile: query rows of one attention block; an incomplete block costs a whole one. 1 = no tiles.
        embedding_s_per_token: on the first stage, once in forward and once in backward.
        head_s_per_token, head_pack_s: final norm, logits, loss and their gradient, all in the LAST STAGE'S BACKWARD.
        optimizer_s_per_parameter: one parameter of the rank's own shard.
        p2p_bandwidth_bytes_per_s, p2p_latency_s: one transfer between neighbouring pipeline stages.
        reduce_bandwidth_bytes_per_s, reduce_latency_s: one step of the ring over data-parallel ranks.
        gather_link: the same, of all-gathers; None = as `reduce_*`.
        intra_node, inter_node, devices_per_node: links of tensor- and context-parallel groups, by how many consecutive
            devices a group spans.
        nics_per_node: adapters of a node, of which `inter_node` is one; None = `inter_node` is what a group gets in
            all.
        host_link: to host memory, for offloaded activations.
        tensor_exposed_share: of the bytes of a tensor-parallel group's transfers, what does not hide behind matrix
            products; 0 = layers were measured with all of their transfers.
        weight_gather_exposed_share: the same, of the transfers that W of a split backward makes again.
        weight_share: of a backward's `linear_s_per_token` and `pack_s`, what W of a split backward takes; None = half.
        context_hidden_share: of the attention of documents whole on one rank, behind which transfers of K and V hide.
        copy_s_per_byte: read one byte and write it elsewhere on the device.
        context_exchange: how K and V of shared documents are exchanged: gathered once, or round the ranks.
        overlap: how packs and the collectives of gradients and weights slow each other; None = not measured, and
            nothing is overlapped.
        overlap_reduction, overlap_gather: `train.overlap_reduction` and `train.overlap_gather` of the run.
        copies: between processes of a machine, when a run changes its layout; None = not measured, and priced as
            transfers inside a node.
        measured_on: the model and layout that were measured; profile: how, by `evenload profile`.

    Raises:
        ConfigError: a negative time or a bandwidth that is not positive.
    """

    source: Literal["analytic", "calibrated"]
    device: str
    peak_flops_per_s: float
    forward: PassCoefficients
    backward: PassCoefficients
    attention_tile: int = 1
    embedding_s_per_token: float = 0.0
    head_s_per_token: float = 0.0
    head_pack_s: float = 0.0
    optimizer_s_per_parameter: float = 0.0
    p2p_bandwidth_bytes_per_s: float | None = None
    p2p_latency_s: float = 0.0
    reduce_bandwidth_bytes_per_s: float | None = None
    reduce_latency_s: float = 0.0
    gather_link: LinkSpec | None = None
    intra_node: LinkSpec | None = None
    inter_node: LinkSpec | None = None
    devices_per_node: int = 1
    nics_per_node: int | None = None
    host_link: LinkSpec | None = None
    tensor_exposed_share: float = 1.0
    weight_gather_exposed_share: float = 1.0
    weight_share: float | None = None
    context_hidden_share: float = 0.8
    copy_s_per_byte: float = 0.0
    context_exchange: Literal["all_gather", "ring"] = "all_gather"
    overlap: OverlapCost | None = None
    overlap_reduction: bool = True
    overlap_gather: bool = True
    copies: CopySpec | None = None
    measured_on: MeasuredOn | None = None
    profile: Profile | None = None

    def __post_init__(self) -> None:
        values = msgspec.structs.asdict(self)
        for name in ("forward", "backward"):
            of_pass = msgspec.structs.asdict(getattr(self, name))
            values |= {f"{name}.{field}": value for field, value in of_pass.items()}
        for field, value in values.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue  # no number, or not known
            if field.endswith(("bytes_per_s", "flops_per_s")):
                holds, range_ = value > 0, "> 0"
            elif field.endswith(("_tile", "_per_node")):
                holds, range_ = value >= 1, ">= 1"
            elif field.endswith("_share"):
                holds, range_ = 0 <= value <= 1, "in 0..1"
            else:
                holds, range_ = value >= 0, ">= 0 seconds"
            if not holds:
                raise ConfigError(f"cost coefficients of {self.device}: {field} is {value}, must be {range_}")

    @property
    def noise(self) -> Noise | None:
        """Return the noise of the machine while these were measured; None where it is not known."""
        return self.measured_on.noise if self.measured_on is not None else None

    @property
    def is_changed(self) -> bool:
        """Say whether a profile was changed after it was measured, by hand or by another program."""
        return self.profile is not None and self.profile.digest != digest_of(self)

    @property
    def reduction_overlap(self) -> OverlapCost | None:
        """Return what reducing gradients during backwards costs; None where they are reduced after the last backward:
        it is not configured, not measured, or does not pay."""
        return self._overlap_if(is_wanted=self.overlap_reduction)

    @property
    def gather_overlap(self) -> OverlapCost | None:
        """Return what gathering weights during forwards costs; None where they are gathered before the first one."""
        return self._overlap_if(is_wanted=self.overlap_gather)

    def _overlap_if(self, *, is_wanted: bool) -> OverlapCost | None:
        return self.overlap if is_wanted and self.overlap is not None and self.overlap.pays else None

    def split_share(self, model: ModelSpec) -> float:
        """Return the share of the backward of linear layers that W of a split backward defers: `weight_share`, half
        where it was not measured, 0 where the matrices are frozen (LoRA)."""
        if model.has_adapters:
            return 0.0
        return 0.5 if self.weight_share is None else self.weight_share

    def stage_link(self) -> LinkSpec:
        """Return the link between pipeline stages; raises `ConfigError` where it is not known."""
        return self._known_link("p2p", "between pipeline stages, so a layout with pp above 1", "pp=1")

    def ring_seconds(
        self, num_bytes: float, copies: int, calls: int = 1, way: Literal["sum", "gather"] = "sum"
    ) -> float:
        """Return the seconds of `calls` reduce-scatters ("sum") or all-gathers of `num_bytes` together (whole buffers)
        over the ranks with copies of the weights: `(n-1)/n` of the bytes over every link, in `n-1` steps a call.

        Raises:
            ConfigError: several copies, and no link between them is known.
        """
        if copies == 1:
            return 0.0
        purpose = "that gradients are reduced over, so a layout with dp or cp above 1"
        link, steps = self._known_link("reduce", purpose, "dp=1"), copies - 1
        if way == "gather" and self.gather_link is not None:
            link = self.gather_link
        return num_bytes * steps / copies / link.bandwidth_bytes_per_s + calls * steps * link.latency_s

    def update_seconds(self, element_bytes: int, copies: int) -> tuple[float, float]:
        """Return the seconds of one reduction or gather of no bytes, and those that a trained parameter takes after the
        packs, to be reduced, updated and gathered; raises as `ring_seconds`."""
        latency_s = self.ring_seconds(0.0, copies)
        moved_s = self.ring_seconds(float(max(element_bytes, 4) + element_bytes), copies) - latency_s
        return latency_s, moved_s + self.optimizer_s_per_parameter / copies

    def link_or_none(self, kind: Literal["p2p", "reduce"]) -> LinkSpec | None:
        """Return the link between pipeline stages, or over which gradients are reduced; None where it is not known."""
        bandwidth_bytes_per_s: float | None = getattr(self, f"{kind}_bandwidth_bytes_per_s")
        if bandwidth_bytes_per_s is None:
            return None
        return LinkSpec(bandwidth_bytes_per_s=bandwidth_bytes_per_s, latency_s=getattr(self, f"{kind}_latency_s"))

    def _known_link(self, kind: Literal["p2p", "reduce"], purpose: str, without: str) -> LinkSpec:
        link = self.link_or_none(kind)
        if link is None:
            raise ConfigError(
                f"cost coefficients of {self.device} know no link {purpose} cannot be costed; set "
                f"{kind}_bandwidth_bytes_per_s and {kind}_latency_s in the cost file, measure such a layout with "
                f"evenload profile, or plan with {without}"
            )
        return link

    def group_link(self, members: int, stride: int) -> LinkSpec:
        """Return the link that bounds a collective over `members` ranks that lie `stride` devices apart (1 in a
        tensor-parallel group, tp in a context-parallel one and among replicas that share documents); raises
        `ConfigError` where it is not known."""
        link = self.group_link_or_none(members, stride)
        if link is None:
            raise ConfigError(
                f"cost coefficients of {self.device} know no link for a group over {members * stride} devices; "
                "set intra_node, inter_node and devices_per_node in the cost file, or plan without cp and tp"
            )
        return link

    def group_link_or_none(self, members: int, stride: int) -> LinkSpec | None:
        if members * stride <= self.devices_per_node:
            return self.intra_node
        if self.nics_per_node is None or self.inter_node is None:
            return self.inter_node
        inside = self.intra_node or LinkSpec(bandwidth_bytes_per_s=float("inf"), latency_s=0.0)
        return group_link(members, stride, self.devices_per_node, self.nics_per_node, inside, self.inter_node)

    def device_link(self, *, leaves_node: bool) -> LinkSpec:
        """Return the link between two devices, of one node or of two; raises `ConfigError` where it is not known."""
        link = self.inter_node if leaves_node else self.intra_node
        if link is None:
            place = "another node" if leaves_node else "its node"
            raise ConfigError(
                f"cost coefficients of {self.device} know no link from a device to one of {place}; set "
                f"{'inter_node' if leaves_node else 'intra_node'} and devices_per_node in the cost file"
            )
        if leaves_node and self.nics_per_node is not None:
            return device_share(link, self.nics_per_node, self.devices_per_node)
        return link


def read_coefficients(path: str | Path) -> CostCoefficients:
    """Read a cost file.

    Raises:
        ConfigError: the file is missing or is not a cost file; the message names the field.
    """
    try:
        tree = msgspec.json.decode(Path(path).expanduser().read_bytes())
        if isinstance(tree, dict) and isinstance(measured := tree.get("measured_on"), dict):
            measured["model"] = model_tree(measured.get("model"))
        return msgspec.convert(tree, CostCoefficients)
    except OSError as error:
        raise unreadable(f"cost file {path}", error) from error
    except msgspec.MsgspecError as error:
        raise ConfigError(f"cost file {path} is not valid: {error}; make it again with evenload profile") from error


def write_coefficients(path: str | Path, coefficients: CostCoefficients) -> None:
    Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(coefficients), indent=2) + b"\n")
