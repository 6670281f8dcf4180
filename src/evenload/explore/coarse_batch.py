"""`coarse_problem`: a small problem that stands for a layout with very many replicas.

Replicas of a large cluster are much alike, so a step of 512 of them with 4,096 documents takes about as long as one of
16 with every 32nd document. Planning the small one takes seconds where the whole takes minutes, and tells layouts
apart. Of documents sorted by length every group of k gives the one in its middle, the first group its longest, which no
layout gets round. What is small is only `dp`: stages, context and tensor ranks, the rest of a rank's memory, and the
seconds of sums, gathers and updates are the whole's. Tokens that were dropped are the whole's, too.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from evenload.cost.coefficients import CostCoefficients
from evenload.cost.memory import static_bytes
from evenload.explore.sampled_batches import SampledBatch
from evenload.types.cluster import LinkSpec
from evenload.types.layout import ParallelLayout, split_layout
from evenload.types.model import ModelSpec

LARGE_CLUSTER = 512
"""Devices up to which layouts are rated on whole batches."""
LEAST_REPLICAS = 16
LEAST_DOCUMENTS = 64


class CoarseProblem(NamedTuple):
    """Every `stride`-th replica and document; `room_bytes` leaves activations the room that they have in the whole.

    Args:
        raised_bytes: by which that is more than a device has, because fewer replicas share the optimizer's state.
    """

    layout: ParallelLayout
    batch: SampledBatch
    room_bytes: int
    stride: int
    raised_bytes: int = 0


def coarse_problem(model: ModelSpec, layout: ParallelLayout, batch: SampledBatch, room_bytes: int) -> CoarseProblem:
    """The whole where the cluster is not large, or there is nothing to leave out."""
    stride = _stride(layout, len(batch.documents))
    if stride == 1:
        return CoarseProblem(layout, batch, room_bytes, 1)
    small = split_layout(layout.stage_counts, dp=layout.dp // stride, cp=layout.cp, pp=layout.pp, tp=layout.tp)
    raised = int(static_bytes(model, small).max() - static_bytes(model, layout).max())
    longest_first = sorted(batch.documents, key=lambda document: -document.num_tokens)
    taken = [longest_first[0], *longest_first[stride + stride // 2 :: stride]]
    kept = {document.doc_id for document in taken}
    documents = tuple(document for document in batch.documents if document.doc_id in kept)
    part = SampledBatch(documents, (), batch.dropped_tokens)
    return CoarseProblem(small, part, room_bytes + raised, stride, raised)


def coarse_problems(
    model: ModelSpec, layout: ParallelLayout, batches: Sequence[SampledBatch], room_bytes: int
) -> tuple[CoarseProblem, ...]:
    """Of every batch, all in one small layout; the wholes where the batches have too different numbers of documents."""
    found = tuple(coarse_problem(model, layout, batch, room_bytes) for batch in batches)
    if len({one.stride for one in found}) == 1:
        return found
    return tuple(CoarseProblem(layout, batch, room_bytes, 1) for batch in batches)


def coarse_coefficients(
    coefficients: CostCoefficients, whole: ParallelLayout, small: ParallelLayout
) -> CostCoefficients:
    """With which sums, gathers and the update take as long over the small layout's replicas as over the whole's."""
    many, few = max(whole.data_sizes), max(small.data_sizes)
    if many == few:
        return coefficients
    steps, share = (many - 1) / (few - 1), (many - 1) / many / ((few - 1) / few)
    bandwidth, gather = coefficients.reduce_bandwidth_bytes_per_s, coefficients.gather_link
    return msgspec.structs.replace(
        coefficients,
        reduce_bandwidth_bytes_per_s=None if bandwidth is None else bandwidth / share,
        reduce_latency_s=coefficients.reduce_latency_s * steps,
        gather_link=None
        if gather is None
        else LinkSpec(bandwidth_bytes_per_s=gather.bandwidth_bytes_per_s / share, latency_s=gather.latency_s * steps),
        optimizer_s_per_parameter=coefficients.optimizer_s_per_parameter * few / many,
    )


def _stride(layout: ParallelLayout, documents: int) -> int:
    if layout.world_size <= LARGE_CLUSTER or layout.has_wide_stages:
        return 1
    most = min(layout.dp // LEAST_REPLICAS, documents // LEAST_DOCUMENTS)
    return max((stride for stride in range(1, most + 1) if layout.dp % stride == 0), default=1)
