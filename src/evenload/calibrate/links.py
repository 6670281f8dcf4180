"""Time transfers between the ranks of a run and to host memory, and how collectives and compute slow each other.

    seconds = latency + bytes / bandwidth     (Skrull Eq. 16)

is fitted to several sizes like packs. All ranks of a group make a call together, as the runtime does. Overlap is
measured on a CPU, where gloo moves bytes with the cores that compute: reduce-scatters and all-gathers in a thread, and
matrix products until they are done, each alone just before; some 0.4 s. On a GPU it is assumed (`OverlapCost`).
"""

import functools
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar, get_args

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from evenload.calibrate.fit import fit_relative, median_seconds
from evenload.cost.coefficients import CostCoefficients, OverlapCost
from evenload.cost.validity import link_fields
from evenload.runtime.comm.collectives import ContextGroup, ThreadQueue, all_gather_single, reduce_scatter_single
from evenload.runtime.comm.mesh import Mesh, Meshes, gather_from_all
from evenload.types.cluster import LinkSpec

Measured = TypeVar("Measured", LinkSpec, OverlapCost)
TransferKind = Literal["pipeline", "reduction", "gather", "context", "tensor", "host"]

QUICK_BYTES = (64, 1 << 20, 4 << 20)  # sizes at the start of a run
GRID_BYTES = (64, 1 << 10, 1 << 13, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)  # sizes of `evenload profile`
_ELEMENT_BYTES = 4
_LEAST_SEEN_SHARE = 0.01  # of the largest transfer's seconds, that its bytes must take to show a bandwidth


@dataclass(frozen=True, eq=False)
class TransferWork:
    """Describes one kind of transfer that this rank takes part in: ranks of the group, transfers from a rank to the
    next, one after the other, in one call, and what makes buffers for so many bytes a hop and returns the call."""

    kind: TransferKind
    ranks: int
    hops: int
    call: Callable[[int], Callable[[], object]]


def transfers_of(mesh: Mesh) -> Iterator[TransferWork]:
    """Yield this rank's transfers, in one order on all ranks; of groups that may share documents the largest."""
    if (pipeline := _pipeline(mesh)) is not None:
        yield pipeline
    if (size := mesh.data_size) > 1:
        # Apart: gloo sums in twice the time in which it gathers.
        scatter = functools.partial(reduce_scatter_single, op=dist.ReduceOp.SUM, group=mesh.data)
        yield _collective("reduction", size, size - 1, mesh, scatter)
        gather = functools.partial(all_gather_single, group=mesh.data)
        yield _collective("gather", size, size - 1, mesh, lambda own, whole: gather(whole, own))
    if mesh.context:
        group = mesh.context[max(mesh.context, key=lambda block: block.size)]
        yield _collective("context", group.size, 2 * (group.size - 1), mesh, functools.partial(_exchange, group))
    if (tensor := mesh.tensor) is not None:
        size = tensor.shard.size
        yield _collective("tensor", size, size - 1, mesh, lambda own, _: tensor.all_gather(own, "calibration").wait())
    if mesh.device.type == "cuda":  # on a CPU, offloading saves nothing
        yield _host(mesh.device)


def quick_links(mesh: Mesh, kinds: Collection[TransferKind] = get_args(TransferKind)) -> dict[TransferKind, LinkSpec]:
    links = {}
    for work in (one for one in transfers_of(mesh) if one.kind in kinds):
        seconds = [median_seconds(work.call(size), mesh.device) / work.hops for size in QUICK_BYTES]
        links[work.kind] = link_from(QUICK_BYTES, seconds)
    return links


def links_of_layouts(costs: CostCoefficients, meshes: Meshes) -> CostCoefficients:
    """Return the costs with links that only other layouts of a run use, which are measured there: between stages where
    the first has none, between replicas where it has none. Collective over all ranks of the run, idle ones too."""
    others = [meshes.of(layout) for layout in meshes.layouts]
    staged = next((mesh for mesh in others if mesh.layout.pp > 1), None)
    summed = max(others, key=lambda mesh: max(mesh.layout.data_sizes))
    fields: dict[str, object] = {}
    if costs.link_or_none("p2p") is None and staged is not None:
        fields |= link_fields("p2p", _medians(staged, "pipeline")["pipeline"])
    if costs.link_or_none("reduce") is None and max(summed.layout.data_sizes) > 1:
        links = _medians(summed, "reduction", "gather")
        fields |= link_fields("reduce", links["reduction"]) | {"gather_link": links["gather"]}
    return msgspec.structs.replace(costs, **fields)


def _medians(mesh: Mesh, *kinds: TransferKind) -> dict[TransferKind, LinkSpec]:
    """Measure some kinds of transfers in one layout; medians over its ranks. Collective over all ranks of the run."""
    everyone = gather_from_all({} if mesh.is_idle else quick_links(mesh, kinds), mesh)
    links = {kind: median_link(everyone, kind) for kind in kinds}
    return {kind: link for kind, link in links.items() if link is not None}


def link_from(num_bytes: Sequence[int], seconds: Sequence[float]) -> LinkSpec:
    latency_s, byte_s = fit_relative([(1.0, float(size)) for size in num_bytes], seconds)
    if byte_s * num_bytes[-1] < _LEAST_SEEN_SHARE * seconds[-1]:
        # Too few bytes to see what one costs: as if it were all of the largest transfer.
        byte_s = seconds[-1] / num_bytes[-1]
    return LinkSpec(bandwidth_bytes_per_s=1 / byte_s, latency_s=latency_s)


def median_link(ranks: Sequence[Mapping[TransferKind, LinkSpec]], *kinds: TransferKind) -> LinkSpec | None:
    """Return the median over ranks of the first of these kinds that each measured; None = none did."""
    return median_of([next((links[kind] for kind in kinds if kind in links), None) for links in ranks])


def median_of(ranks: Sequence[Measured | None]) -> Measured | None:
    """Return the medians, field by field, over the ranks that measured; None = none did."""
    known = [one for one in ranks if one is not None]
    if not known:
        return None
    medians = np.median([msgspec.structs.astuple(one) for one in known], axis=0).tolist()
    return type(known[0])(**dict(zip(known[0].__struct_fields__, medians, strict=True)))


def _pipeline(mesh: Mesh) -> TransferWork | None:
    """Transfer to the next stage, or to the next replica; None for a rank that takes no part, or is alone."""
    if mesh.layout.pp > 1:
        ends = [mesh.rank_of_stage(stage) for stage in (0, 1)]
        between = mesh.channel_groups.get(mesh.channel("F", 1, pack=0))
        if mesh.rank not in ends or between is None:
            return None
        group, me = between, int(mesh.rank != min(ends))  # members of a group are in rank order
    else:
        group, me = mesh.data, mesh.data_rank
        if mesh.data_size == 1 or me > 1:
            return None
    return TransferWork(
        "pipeline", 2, 2, lambda size: functools.partial(_there_and_back, _zeros(size, mesh), group, me)
    )


def _there_and_back(tensor: torch.Tensor, group: dist.ProcessGroup, me: int) -> None:
    peer = dist.get_global_rank(group, 1 - me)
    for transfer in (dist.send, dist.recv) if me == 0 else (dist.recv, dist.send):
        transfer(tensor, peer, group=group)


def _collective(
    kind: TransferKind, ranks: int, hops: int, mesh: Mesh, run: Callable[[torch.Tensor, torch.Tensor], object]
) -> TransferWork:
    """Transfer by all groups of the layout at once; `run` gets rows of one rank, and as many of each."""

    def call(num_bytes: int) -> Callable[[], object]:
        own = _zeros(num_bytes, mesh)
        whole = own.new_zeros(ranks * own.numel())

        def transfer() -> None:
            with mesh.watch.waiting("calibration"):
                run(own, whole)

        return transfer

    return TransferWork(kind, ranks, hops, call)


def _exchange(group: ContextGroup, own: torch.Tensor, whole: torch.Tensor) -> None:
    group.all_gather(own, "calibration").wait()
    group.reduce_scatter(whole, "calibration").wait()


def _host(device: torch.device) -> TransferWork:
    """Copy to pinned host memory, for offloading; all ranks at once, as in a step."""

    def call(num_bytes: int) -> Callable[[], object]:
        host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        rows = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        return lambda: host.copy_(rows, non_blocking=True)

    return TransferWork("host", 1, 1, call)


def _zeros(num_bytes: int, mesh: Mesh) -> torch.Tensor:
    return torch.zeros(num_bytes // _ELEMENT_BYTES, device=mesh.device)


_ELEMENTS = 1 << 19  # float32 of one transfer, over all ranks of its group
_NUM_CALLS, _NUM_TRIALS, _PRODUCT_SIZE = 6, 7, 256


def overlap_cost(mesh: Mesh) -> OverlapCost | None:
    """Time collectives and compute together, medians of one rank; None on a GPU, and where no other rank holds the same
    weights. Collective over the data group."""
    group = mesh.data
    if mesh.device.type != "cpu" or group is None or group.size() == 1:
        return None
    whole = torch.zeros(-(-_ELEMENTS // group.size()) * group.size())
    shard = whole[: len(whole) // group.size()]

    def transfer() -> None:
        reduce_scatter_single(shard, whole, op=dist.ReduceOp.SUM, group=group)
        all_gather_single(whole, shard.clone(), group=group)

    trials = [_trial(mesh, group, transfer) for _ in range(1 + _NUM_TRIALS)][1:]
    communication, compute = (statistics.median(column) for column in zip(*trials, strict=True))
    # Below 0 where the compute that ran alone was disturbed.
    return OverlapCost(communication_slowdown=communication, compute_slowdown=min(1.0, max(0.0, compute)))


def measured_overlap(meshes: Meshes) -> OverlapCost | None:
    """Time as `overlap_cost` in the layout in which most ranks hold the same weights, medians over all ranks.
    Collective over all ranks of the run, idle ones too."""
    mesh = max((meshes.of(layout) for layout in meshes.layouts), key=lambda one: max(one.layout.data_sizes))
    return median_of(gather_from_all(None if mesh.is_idle else overlap_cost(mesh), mesh))


def _trial(mesh: Mesh, group: dist.ProcessGroup, transfer: Callable[[], None]) -> tuple[float, float]:
    """Return the slowdown of transfers that overlap with compute, and the share of that time that compute lost."""
    square = torch.ones(_PRODUCT_SIZE, _PRODUCT_SIZE)
    dist.barrier(group=group)
    start_s = time.perf_counter()
    for _ in range(_NUM_CALLS):
        transfer()
    alone_s = time.perf_counter() - start_s
    dist.barrier(group=group)
    products = 0
    start_s = time.perf_counter()
    while not products or time.perf_counter() - start_s < alone_s:
        square @ square
        products += 1
    product_s = (time.perf_counter() - start_s) / products
    dist.barrier(group=group)
    queue, done = ThreadQueue(mesh.device), []
    products = 0
    start_s = time.perf_counter()
    for _ in range(_NUM_CALLS):
        queue.put(transfer)
    queue.put(lambda: done.append(time.perf_counter()))
    while not (done or queue.has_failed):
        square @ square
        products += 1
    queue.wait()
    together_s = done[0] - start_s
    return together_s / alone_s, 1 - products * product_s / together_s
