"""`CostCoefficients`: everything the cost model knows about a device, in seconds and bytes, by value.

The analytic model (`cost.analytic`) and the calibration on the user's device fill the same struct, so that
planners and the simulator never know where a number came from. A file of it is plain JSON and is the only way
in which measurements return to planning; it says what it was measured on (`cost.coverage` compares that with what is
planned), and what was not measured is absent rather than free.

Time of a pack on one layer is linear in five features of the pack:

    linear_s_per_token · tokens + attention_s_per_pair · pairs + prefix_s_per_token · prefix + slice_s · slices + pack_s

`prefix` is the tokens before each slice, summed over slices (`start`, at most the window): keys a slice reads and,
in backward, gradients of K and V it adds to. Finer cuts pay it again and again, which bounds how fine is worth it.
With whole tiles in `pairs` it is WLB-LLM's table of kernels (§5.3): r rows in tiles of t behind K keys take
K·(a·t·ceil(r / t) + b), so their achieved FLOP/s rise with r as r / (t·ceil(r / t) + b / a). A profile measures t, a
and b, and beside them the kernel's own rates by rows and keys.

`pack_s` carries the inefficiency of small matrix products. A product over n tokens that reaches the share
n / (n + n_half) of its best speed takes `c·n / (n / (n + n_half)) = c·n + c·n_half`: the loss is exactly an
additive constant per pack, so it needs no non-linear term and sums stay sums.

A device that its host only queues work for is never ahead of its host, which needs a pack's kernels queued one by one:

    host_slice_s · slices + host_pack_s

A pack on a stage takes the longer of the two. Where both were measured (`calibrate.pack_clock`) small packs take their
host's seconds; data sheets have none and put launches into `pack_s`, on top of the device's, which is never less.
"""

from pathlib import Path
from typing import Literal

import msgspec

from evenload.cost.copy_spec import CopySpec
from evenload.cost.measured_on import Disturbance, MeasuredOn
from evenload.cost.profile_record import Profile, digest_of
from evenload.errors import ConfigError, unreadable
from evenload.types.base import Frozen
from evenload.types.cluster import LinkSpec, device_share, group_link

_SECONDS = (
    "embedding_s_per_token", "head_s_per_token", "head_pack_s", "optimizer_s_per_parameter", "p2p_latency_s",
    "reduce_latency_s", "copy_s_per_byte",
)  # fmt: skip

_NO_BOUND = LinkSpec(bandwidth_bytes_per_s=float("inf"), latency_s=0.0)
"""Where the link inside a node is not known."""


class PassCoefficients(Frozen):
    """Seconds of one direction (forward or backward) on ONE layer.

    Args:
        linear_s_per_token: all matrix products and elementwise work of one token.
        attention_s_per_pair: one query attending to one key, all heads.
        prefix_s_per_token: one token of the prefix of a slice, on top of its pairs.
        slice_s: constant of every slice (document piece) in a pack.
        pack_s: constant of every pack: kernel launches and the n/(n+n_half) loss of matrix products.
        host_slice_s, host_pack_s: until the host has queued a slice's, and a pack's, part of this layer on the device;
            0 where the device is the host, and where it was not measured apart.
    """

    linear_s_per_token: float
    attention_s_per_pair: float
    prefix_s_per_token: float = 0.0
    slice_s: float = 0.0
    pack_s: float = 0.0
    host_slice_s: float = 0.0
    host_pack_s: float = 0.0


class OverlapCost(Frozen):
    """How much collective communication and compute slow each other while both run: reduce-scatters of gradients beside
    backwards, all-gathers of weights beside forwards.

    Args:
        communication_slowdown: seconds of a collective beside compute over its seconds alone.
        compute_slowdown: share of the time of such a collective that compute loses, 0..1. Where cores that compute move
            the bytes it is near 1, and nothing is gained; the default is for devices that copy beside their kernels,
            and not measured.

    Raises:
        ConfigError: a factor that is not above 0, or a share that is not in 0..1.
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
        """Say whether a collective keeps less from computing than it takes alone; else it had better run alone."""
        return self.communication_slowdown * self.compute_slowdown < 1


class CostCoefficients(Frozen):
    """What computing and communicating costs.

    Args:
        source: "analytic" (from data sheets) or "calibrated" (measured on the device).
        device: name of the device, shown to users.
        peak_flops_per_s: of one device; MFU is a share of it.
        forward, backward: seconds per layer.
        attention_tile: query rows of one attention block; an incomplete block costs a whole one. 1 = no tiles.
        embedding_s_per_token: on the first stage, once in forward and once in backward.
        head_s_per_token, head_pack_s: final norm, logits, loss and their gradient. Charged to the LAST STAGE'S
            BACKWARD, because that is where the runtime computes them.
        optimizer_s_per_parameter: one parameter of the rank's own shard.
        p2p_bandwidth_bytes_per_s, p2p_latency_s: one transfer between neighbouring pipeline stages; None = not known.
        reduce_bandwidth_bytes_per_s, reduce_latency_s: one step of the ring over data-parallel ranks; None = unknown.
        gather_link: the same, of gathers; None = as `reduce_*`, which are of sums.
        intra_node, inter_node, devices_per_node: links that tensor- and context-parallel groups use, by how many
            consecutive devices a group spans; None = such groups cannot be costed.
        nics_per_node: adapters of a node, of which `inter_node` is one; None = `inter_node` is what a group gets in
            all, as measured.
        host_link: to host memory, for offloaded activations; None = offloading cannot be costed.
        tensor_exposed_share: of the bytes of a tensor-parallel group's transfers, what does not hide behind matrix
            products; 0 = layers were measured with all of their transfers.
        weight_gather_exposed_share: the same, of the transfers that W of a split backward makes again.
        weight_share: of a backward's `linear_s_per_token` and `pack_s`, what W of a split backward takes. Less than
            half where elementwise work, which stays in I, is a part of these seconds; None = not measured, and half is
            taken, which it is by count of products (`cost.split_backward`).
        context_hidden_share: of the attention of documents that lie whole on one rank, behind which transfers of K and
            V of others hide; below 1 because both slow each other down.
        copy_s_per_byte: read one byte and write it elsewhere on the device.
        context_exchange: how keys and values of shared documents travel: gathered once, or round the ranks.
        overlap: how much packs slow, and are slowed by, gradients that are reduced and weights that are gathered
            meanwhile, unit by unit; None = not measured, and neither runs beside compute.
        overlap_reduction: gradients are reduced while later ones are computed (`train.overlap_reduction`), else after
            the last backward; overlap_gather: updated weights are gathered while the next step begins
            (`train.overlap_gather`), else before it.
        copies: between processes of a machine that read each other's memory, when a run changes its layout; None = not
            measured, and priced as transfers inside a node.
        measured_on: the model and layout that were measured; None where nothing was.
        profile: how `evenload profile` measured them; None = they are of the start of a run, or of a data sheet.

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
        seconds = {name: getattr(self, name) for name in _SECONDS}
        for name in ("forward", "backward"):
            of_pass = msgspec.structs.asdict(getattr(self, name))
            seconds |= {f"{name}.{field}": value for field, value in of_pass.items() if value is not None}
        for field, value in seconds.items():
            if not value >= 0:
                raise ConfigError(f"cost coefficients of {self.device}: {field} is {value}, must be >= 0 seconds")
        for field in ("peak_flops_per_s", "p2p_bandwidth_bytes_per_s", "reduce_bandwidth_bytes_per_s"):
            value = getattr(self, field)
            if value is not None and not value > 0:
                raise ConfigError(f"cost coefficients of {self.device}: {field} is {value}, must be > 0")
        if self.attention_tile < 1:
            raise ConfigError(
                f"cost coefficients of {self.device}: attention_tile is {self.attention_tile}, must be >= 1"
            )
        if self.nics_per_node is not None and self.nics_per_node < 1:
            raise ConfigError(
                f"cost coefficients of {self.device}: nics_per_node is {self.nics_per_node}, must be >= 1 or absent"
            )
        for field in ("tensor_exposed_share", "weight_gather_exposed_share", "weight_share", "context_hidden_share"):
            share = getattr(self, field)
            if share is not None and not 0 <= share <= 1:
                raise ConfigError(f"cost coefficients of {self.device}: {field} is {share}, must be in 0..1")

    def of_pass(self, direction: Literal["forward", "backward"]) -> PassCoefficients:
        """Of one direction."""
        return self.forward if direction == "forward" else self.backward

    @property
    def disturbance(self) -> Disturbance | None:
        """Of the machine while these were measured; None where nothing was, or an older version did not keep it."""
        if self.measured_on is not None and self.measured_on.disturbance is not None:
            return self.measured_on.disturbance
        if self.profile is None:
            return None
        return Disturbance(waited_share=self.profile.waited_share, spread=self.profile.spread)

    @property
    def is_changed(self) -> bool:
        """A profile was changed after it was measured, by hand or by another program."""
        if self.profile is None:
            return False
        return self.profile.digest != digest_of(self)

    @property
    def reduction_overlap(self) -> OverlapCost | None:
        """Return what reducing gradients beside backwards costs; None where they are reduced after the last one: it is
        not configured, not measured, or does not pay."""
        return self._overlap_if(is_wanted=self.overlap_reduction)

    @property
    def gather_overlap(self) -> OverlapCost | None:
        """Return what gathering weights beside forwards costs; None where they are gathered before the first one."""
        return self._overlap_if(is_wanted=self.overlap_gather)

    def _overlap_if(self, *, is_wanted: bool) -> OverlapCost | None:
        return self.overlap if is_wanted and self.overlap is not None and self.overlap.pays else None

    def stage_link(self) -> LinkSpec:
        """The link between neighbouring pipeline stages; a `ConfigError` where it is not known."""
        return self._known_link("p2p", "between pipeline stages, so a layout with pp above 1", "pp=1")

    def ring_seconds(
        self, num_bytes: float, copies: int, calls: int = 1, way: Literal["sum", "gather"] = "sum"
    ) -> float:
        """Reduce-scatters or all-gathers of `num_bytes` (whole buffers) over the ranks with copies of the weights.

        A ring moves `(n-1)/n` of the bytes over every link in `n-1` steps. A `ConfigError` where there are several
        copies and no link between them is known.

        Args:
            calls: one after the other, whose bytes these are.
        """
        if copies == 1:
            return 0.0
        purpose = "that gradients are reduced over, so a layout with dp or cp above 1"
        link, steps = self._known_link("reduce", purpose, "dp=1"), copies - 1
        if way == "gather" and self.gather_link is not None:
            link = self.gather_link
        return num_bytes * steps / copies / link.bandwidth_bytes_per_s + calls * steps * link.latency_s

    def _known_link(self, kind: Literal["p2p", "reduce"], purpose: str, without: str) -> LinkSpec:
        bandwidth_bytes_per_s: float | None = getattr(self, f"{kind}_bandwidth_bytes_per_s")
        if bandwidth_bytes_per_s is None:
            raise ConfigError(
                f"cost coefficients of {self.device} know no link {purpose} cannot be costed; set "
                f"{kind}_bandwidth_bytes_per_s and {kind}_latency_s in the cost file, measure such a layout with "
                f"evenload profile, or plan with {without}"
            )
        return LinkSpec(bandwidth_bytes_per_s=bandwidth_bytes_per_s, latency_s=getattr(self, f"{kind}_latency_s"))

    def group_link(self, members: int, stride: int) -> LinkSpec:
        """The link that bounds a collective over `members` ranks that lie `stride` devices apart (1 in a
        tensor-parallel group, tp in a context-parallel one and among replicas that share documents); a `ConfigError`
        where it is not known."""
        link = self.group_link_or_none(members, stride)
        if link is None:
            raise ConfigError(
                f"cost coefficients of {self.device} know no link for a group over {members * stride} devices; "
                "set intra_node, inter_node and devices_per_node in the cost file, or plan without cp and tp"
            )
        return link

    def group_link_or_none(self, members: int, stride: int) -> LinkSpec | None:
        """`group_link`, with None where the link is not known."""
        if members * stride <= self.devices_per_node:
            return self.intra_node
        if self.nics_per_node is None or self.inter_node is None:
            return self.inter_node
        inside = self.intra_node or _NO_BOUND
        return group_link(members, stride, self.devices_per_node, self.nics_per_node, inside, self.inter_node)

    def device_link(self, *, leaves_node: bool) -> LinkSpec:
        """The link from one device to one other, in its node or in another; a `ConfigError` where it is not known."""
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
        return msgspec.json.decode(Path(path).expanduser().read_bytes(), type=CostCoefficients)
    except OSError as error:
        raise unreadable(f"cost file {path}", error) from error
    except msgspec.MsgspecError as error:
        raise ConfigError(f"cost file {path} is not valid: {error}; make it again with evenload profile") from error


def encode_coefficients(coefficients: CostCoefficients) -> bytes:
    """A cost file: indented JSON."""
    return msgspec.json.format(msgspec.json.encode(coefficients), indent=2) + b"\n"


def write_coefficients(path: str | Path, coefficients: CostCoefficients) -> None:
    Path(path).write_bytes(encode_coefficients(coefficients))
