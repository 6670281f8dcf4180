"""Coefficients of a run from what its ranks measured: one cost file for all of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from evenload.calibrate.fit import fit_relative
from evenload.calibrate.link_timings import TransferKind, median_link
from evenload.calibrate.rounds import Sample, pack_features
from evenload.calibrate.weight_timings import TOKENS
from evenload.cost.coefficients import CostCoefficients, OverlapCost, PassCoefficients
from evenload.cost.group_comm import weight_gather_seconds
from evenload.cost.measured_on import Disturbance, MeasuredOn
from evenload.types.cluster import LinkSpec
from evenload.types.layout import ParallelLayout
from evenload.types.micropack import Direction
from evenload.types.model import ModelSpec

DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")


@dataclass(frozen=True, kw_only=True)
class RankMeasurement:
    """What one rank found.

    Args:
        packs: seconds of one layer.
        head: (rows, seconds); empty where the rank has no head.
        peak_flops_per_s: of matrix products.
        optimizer_s: of one parameter.
        copy_s_per_byte: of rows put in place by an index.
        links: of the transfers that the rank takes part in.
        overlap: None = not measured.
        weight_s: of `weight_timings.TOKENS` tokens' weight gradients on one layer.
    """

    disturbance: Disturbance
    packs: tuple[Sample, ...]
    head: tuple[tuple[int, float], ...]
    peak_flops_per_s: float
    optimizer_s: float
    copy_s_per_byte: float
    weight_s: float
    links: dict[TransferKind, LinkSpec] = field(default_factory=dict)
    overlap: OverlapCost | None = None


def most_disturbed(ranks: Sequence[RankMeasurement]) -> Disturbance:
    """The most that any rank had of either."""
    found = [rank.disturbance for rank in ranks]
    return Disturbance(waited_share=max(one.waited_share for one in found), spread=max(one.spread for one in found))


def coefficients_of(
    ranks: Sequence[RankMeasurement], model: ModelSpec, device_name: str, layout: ParallelLayout, tile: int = 1
) -> CostCoefficients:
    """Fit one set of coefficients to all ranks' timings.

    Args:
        tile: query rows of one attention block.
    """
    tp = layout.tp
    head = [point for rank in ranks for point in rank.head]
    head_s_per_token, head_pack_s = fit_relative([(float(rows), 1.0) for rows, _ in head], [s for _, s in head])
    links = [rank.links for rank in ranks]
    # What nobody sent over is not known, which is not the same as free.
    p2p, reduction = median_link(links, "pipeline"), median_link(links, "reduction")
    fitted = CostCoefficients(
        source="calibrated",
        device=device_name,
        peak_flops_per_s=float(np.median([rank.peak_flops_per_s for rank in ranks])),
        forward=_pass(ranks, "forward", tile, tp),
        backward=_pass(ranks, "backward", tile, tp),
        attention_tile=tile,
        head_s_per_token=head_s_per_token * tp,
        head_pack_s=head_pack_s,
        optimizer_s_per_parameter=float(np.median([rank.optimizer_s for rank in ranks])),
        p2p_bandwidth_bytes_per_s=p2p.bandwidth_bytes_per_s if p2p else None,
        p2p_latency_s=p2p.latency_s if p2p else 0.0,
        reduce_bandwidth_bytes_per_s=reduction.bandwidth_bytes_per_s if reduction else None,
        reduce_latency_s=reduction.latency_s if reduction else 0.0,
        gather_link=median_link(links, "gather"),
        # Measured over the largest group that shares documents, wherever its ranks lie, else over one that shares
        # matrices; that one's transfers are in the layers' seconds already.
        intra_node=median_link(links, "context", "tensor"),
        host_link=median_link(links, "host"),
        # A group over more devices than took part may cross other links, which are not known.
        devices_per_node=len(ranks),
        # The runtime waits for every one of them where it starts. Under tp they are in the layers' seconds already, but
        # for what W makes again: whole backwards are timed.
        tensor_exposed_share=0.0 if tp > 1 else 1.0,
        weight_gather_exposed_share=1.0,
        copy_s_per_byte=float(np.median([rank.copy_s_per_byte for rank in ranks])),
        overlap=_median_overlap([rank.overlap for rank in ranks if rank.overlap is not None]),
        measured_on=MeasuredOn(
            model=model,
            dp=layout.dp,
            cp=layout.cp,
            pp=layout.pipeline_ranks,
            tp=layout.tp,
            disturbance=most_disturbed(ranks),
        ),
    )
    return msgspec.structs.replace(fitted, weight_share=_weight_share(ranks, fitted, tp))


def _weight_share(ranks: Sequence[RankMeasurement], fitted: CostCoefficients, tp: int) -> float | None:
    """Of the linears' backward of the pack that was timed, what its weight gradients took, but for the transfers that
    come on top under tp (`group_comm.weight_gather_seconds`). A median of ranks; below 0 or above 1 only noise is.
    None where the linears are free."""
    assert fitted.measured_on is not None
    gather_token_s, gather_pack_s = weight_gather_seconds(fitted.measured_on.model, fitted, tp)
    own_s = float(np.median([rank.weight_s for rank in ranks])) - TOKENS * gather_token_s - gather_pack_s
    linear_s = TOKENS * fitted.backward.linear_s_per_token / tp + fitted.backward.pack_s
    return min(1.0, max(0.0, own_s / linear_s)) if linear_s > 0 else None


def _median_overlap(known: Sequence[OverlapCost]) -> OverlapCost | None:
    if not known:
        return None
    pairs = [(one.communication_slowdown, one.compute_slowdown) for one in known]
    communication, compute = np.median(pairs, axis=0).tolist()
    return OverlapCost(communication_slowdown=communication, compute_slowdown=compute)


def pass_timings(
    ranks: Sequence[RankMeasurement], direction: Direction, tile: int
) -> tuple[list[tuple[float, ...]], list[float], list[Sample]]:
    """Features, the device's seconds and samples of all ranks' packs in one direction."""
    chosen = [sample for rank in ranks for sample in rank.packs if sample.direction == direction]
    features: list[tuple[float, ...]] = [pack_features(one.ranges, one.windows, tile) for one in chosen]
    return features, [sample.seconds for sample in chosen], chosen


def _pass(ranks: Sequence[RankMeasurement], direction: Direction, tile: int, tp: int) -> PassCoefficients:
    features, seconds, samples = pass_timings(ranks, direction, tile)
    tokens, slices, packs, pairs, prefix = fit_relative(features, seconds)
    host_slice_s, host_pack_s = _host_seconds(samples)
    return PassCoefficients(
        # Measured on a part of every matrix; coefficients are of whole ones.
        linear_s_per_token=tokens * tp,
        attention_s_per_pair=pairs * tp,
        prefix_s_per_token=prefix * tp,
        slice_s=slices,
        pack_s=packs,
        host_slice_s=host_slice_s,
        host_pack_s=host_pack_s,
    )


def _host_seconds(samples: Sequence[Sample]) -> tuple[float, float]:
    """Of a host a slice and a pack, by a fit of its own; 0 where devices are their own hosts."""
    queued = [sample for sample in samples if sample.host_s]
    if not queued:
        return 0.0, 0.0
    slices, packs = fit_relative([(float(len(one.ranges)), 1.0) for one in queued], [one.host_s for one in queued])
    return slices, packs
