"""Time rounds of packs through the layers of a stage, with a clock that separates a device's seconds from its host's.

A round is a few documents, each cut alike: all packs forward, then backward in reverse order. Together rounds vary
tokens, slices, pairs and prefix independently, which the fit needs.

On a GPU the host queues a pack's kernels. The time between two CUDA events is the device's own only if it never waited
for the next kernel, so matrix products keep it busy a little longer than the host took before. Few layers are timed at
once, as a device's queue holds 1,024 kernels.
"""

import functools
import math
import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from evenload.cost.layer_counts import (
    activation_bytes_per_token,
    kind_shares,
    kv_bytes_per_token,
    mean_of_layers,
    slice_pairs,
)
from evenload.cost.pack_cost import SliceFeatures, pairs_column, prefix_column
from evenload.runtime.comm.mesh import Mesh, most_of_ranks
from evenload.runtime.device import seconds_now
from evenload.runtime.replay.rank_packs import PackTokens
from evenload.runtime.replay.stage import PipelineStage
from evenload.runtime.replay.store import ActivationStore
from evenload.types.document import Direction, Range
from evenload.types.model import ModelSpec

_PRODUCT_SIZE = 8192  # few of them last long, so that they leave the device's queue to the pack
_TIMED_PRODUCTS = 10
_HEAD_START = 1.5  # factor of the seconds that the host took before
_LONGEST_HEAD_START_S = 0.2  # a first call that compiles or loads kernels takes seconds, the next one does not


class PackSeconds(NamedTuple):
    """Holds a pack's seconds on the device, and those until the host had queued it (0 where they are one)."""

    device_s: float
    host_s: float


class PackClock:
    """Times calls that compute when they are called."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def time(self, pack: Hashable, work: Callable[[], object]) -> PackSeconds:
        """Run the work once; `pack` names it, as the same work is timed again and again."""
        start_s = seconds_now(self._device)
        work()
        return PackSeconds(seconds_now(self._device) - start_s, 0.0)


class QueueClock(PackClock):
    """Times work that calls only queue.

    Args:
        keep_busy: queues work that takes the device so many seconds.
        meet: queues a wait for the ranks that compute the same packs, so that their devices begin together.
        host_reads: the layers' host reads from the device, so all seconds count as the device's, and there is no head
            start, for which the first read would wait.
    """

    def __init__(
        self,
        device: torch.device,
        keep_busy: Callable[[float], object],
        meet: Callable[[], object] | None = None,
        *,
        host_reads: bool = False,
    ) -> None:
        super().__init__(device)
        self._keep_busy, self._meet, self._host_reads = keep_busy, meet, host_reads
        self._host_s: dict[Hashable, float] = {}

    def time(self, pack: Hashable, work: Callable[[], object]) -> PackSeconds:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        stream = torch.cuda.current_stream(self._device)
        before_s = None if self._host_reads else self._host_s.get(pack)
        seconds_now(self._device)
        if before_s is not None:
            self._keep_busy(min(_HEAD_START * before_s, _LONGEST_HEAD_START_S))
        if self._meet is not None:
            self._meet()
        start.record(stream)
        from_s = time.perf_counter()
        work()
        host_s = time.perf_counter() - from_s
        was_ahead = not start.query()
        end.record(stream)
        seconds_now(self._device)
        # The shortest so far, so that a call that was held up does not lengthen the head start, unless the device was
        # not kept busy for long enough.
        self._host_s[pack] = host_s if before_s is None or not was_ahead else min(before_s, host_s)
        return PackSeconds(start.elapsed_time(end) / 1e3, 0.0 if self._host_reads else host_s)


def pack_clock(stage: PipelineStage, mesh: Mesh) -> PackClock:
    device, tensor = stage.device, mesh.tensor
    if device.type != "cuda":
        return PackClock(device)
    flag = torch.zeros(1, device=device)
    meet = None if tensor is None else functools.partial(tensor.all_reduce, flag, "calibration", dist.ReduceOp.MAX)
    has_experts = any(sites.experts for sites in stage.model.structure.sites)
    return QueueClock(device, _busy_products(device), meet, host_reads=has_experts)


def _busy_products(device: torch.device) -> Callable[[float], None]:
    square = torch.zeros(_PRODUCT_SIZE, _PRODUCT_SIZE, device=device, dtype=torch.bfloat16)
    into = torch.empty_like(square)

    def run(count: int) -> None:
        for _ in range(count):
            torch.mm(square, square, out=into)

    run(1)
    start_s = seconds_now(device)
    run(_TIMED_PRODUCTS)
    product_s = (seconds_now(device) - start_s) / _TIMED_PRODUCTS
    return lambda seconds: run(math.ceil(seconds / product_s))


Packs = tuple[tuple[Range, ...], ...]
"""The packs of one round in forward order; they hold whole documents."""
Features = tuple[float, float, float, float, float]
"""[tokens, slices, 1, pairs, prefix] of one pack on one layer, on average over the layers of a stage, each as its share
of the model's mean layer."""

FEW_LAYERS = 4
"""Their forward and backward are some 150 and 420 kernels; a GPU's queue holds 1,024. More say nothing new of a CPU on
which they are slow."""


class LayerShares(NamedTuple):
    """Holds what a layer costs in shares of the model's mean layer (`cost.layer_counts.KindShares`); `reach` is of its
    attention, whose shares are 0 where there is none, `pieces` of what every slice costs."""

    linear: float = 1.0
    attention: float = 1.0
    keys: float = 1.0
    reach: int = 0
    pieces: float = 1.0


class Sample(NamedTuple):
    """Holds the seconds of one pack on one layer (`time_round`: on all timed layers).

    Args:
        seconds: of the device; host_s: until its host had queued the pack, 0 where they are one.
        layers: that were timed.
    """

    direction: Direction
    ranges: tuple[Range, ...]
    seconds: float
    host_s: float = 0.0
    layers: tuple[LayerShares, ...] = (LayerShares(),)


Timed = tuple[Direction, tuple[Range, ...]]
"""Which pack was timed, in which direction."""


def median_sample(repeats: Sequence[Sample]) -> Sample:
    return repeats[0]._replace(
        seconds=statistics.median(one.seconds for one in repeats),
        host_s=statistics.median(one.host_s for one in repeats),
    )


def whole(*lengths: int) -> Packs:
    return (tuple(Range(doc, 0, length) for doc, length in enumerate(lengths)),)


def cut(*cuts: int, others: Sequence[int] = ()) -> Packs:
    """Cut a document into packs at (0, ...) `cuts`; whole documents of the lengths `others` lie in the last one."""
    packs: list[tuple[Range, ...]] = [(Range(0, start, stop),) for start, stop in zip((0, *cuts), cuts, strict=False)]
    packs[-1] += tuple(Range(doc, 0, length) for doc, length in enumerate(others, start=1))
    return tuple(packs)


def num_tokens_of(packs: Packs) -> dict[int, int]:
    lengths: dict[int, int] = {}
    for doc, _, stop in (r for pack in packs for r in pack):
        lengths[doc] = max(lengths.get(doc, 0), stop)
    return lengths


def longest_of(packs: Packs) -> int:
    return max(num_tokens_of(packs).values())


def may_run(packs: Packs, model: ModelSpec) -> bool:
    """Say whether a model runs these packs: not those that cut documents where its layers forbid that."""
    return model.may_cut_documents or all(start == 0 for pack in packs for _, start, _ in pack)


NEEDED_ROUNDS: tuple[Packs, ...] = (
    whole(*[8] * 16),
    whole(128),
    whole(512),
    whole(*[64] * 16),
    whole(*[256] * 4),
    cut(896, 1024),
)
"""Fewer leave coefficients undetermined, so these run whatever they cost."""
QUICK_ROUNDS: tuple[Packs, ...] = (
    *NEEDED_ROUNDS,
    whole(1024),
    whole(2048),
    cut(1536, 2048),
    cut(1920, 2048),
    whole(4096),
    cut(3584, 4096),
    cut(3968, 4096),
)
"""Cheapest first."""

GRID: tuple[Packs, ...] = (
    *QUICK_ROUNDS,
    # Rows that do not fill a tile, and small packs, where constants are most of the time.
    whole(65),
    whole(257),
    whole(*[17] * 24),
    whole(*[129] * 8),
    # As packs are: drawn lengths, with many short documents and few long ones.
    whole(700, 180, 90, 33, 21),
    whole(1500, 260, 140, 80, 45, 23),
    whole(900, 450, 420, 130, 77, 41, 30),
    whole(2600, 800, 340, 150, 120, 60, 26),
    whole(*[1024] * 4),
    whole(3000, 1000),
    cut(1024, 2048, 3072, 4096),
    cut(2048, others=(300, 200, 100)),
    cut(3072, 4096, others=(512, 256, 128, 64)),
    whole(8192),
    cut(7168, 8192),
    cut(4096, 8192),
    cut(7936, 8192, others=(900, 300, 60)),
    whole(16384),
    cut(8192, 12288, 16384),
    cut(16128, 16384),
    whole(32768),
    cut(24576, 32768),
    # Few rows behind many keys, as ranks that share a document have.
    cut(4080, 4096),
    cut(8128, 8192),
)


def rounds_up_to(pack_tokens: int, document_tokens: int) -> tuple[Packs, ...]:
    """Return rounds for a device that only larger packs keep busy, each with twice the tokens, up to a run's largest:
    short documents, one whole document, and the end of one after a prefix."""
    rounds: list[Packs] = []
    tokens = 2 * longest_of(QUICK_ROUNDS[-1])
    while tokens <= pack_tokens:
        short = min(1024, document_tokens)
        rounds.append(whole(*[short] * (tokens // short)))
        if tokens <= document_tokens:
            rounds += [whole(tokens), cut(tokens * 7 // 8, tokens)]
        tokens *= 2
    return tuple(rounds)


def round_flops(packs: Packs, model: ModelSpec) -> float:
    """Count the FLOPs of the forward on a layer without a window."""
    start, stop = (np.array([r[i] for pack in packs for r in pack], dtype=np.int64) for i in (1, 2))
    pairs, tokens = float(slice_pairs(start, stop, 0).sum()), float((stop - start).sum())
    shares = kind_shares(model)
    return 2.0 * shares.mean_products * tokens + 2.0 * shares.mean_pair_width * pairs


def part_of(stage: PipelineStage, kinds: Sequence[int], most: int) -> PipelineStage:
    """Return a stage of its first `most` layers, but at least one of each of its kinds (`ModelSpec.layers`)."""
    layers = list(stage.model.layers)
    first = {kinds[index]: index for index in reversed(layers)}
    chosen = {*layers[:most]} if len({kinds[index] for index in layers[:most]}) == len(first) else {*first.values()}
    return stage if len(chosen) == len(layers) else stage.with_layers(sorted(chosen))


def time_round(stage: PipelineStage, packs: Packs, clock: PackClock) -> Iterator[Sample]:
    """Time a round, forward pack by pack, then backward in reverse, in seconds of all layers. Adds to gradients."""
    num_tokens = num_tokens_of(packs)
    stage.begin_step(num_tokens)
    store = ActivationStore(num_tokens, packs, shard=stage.row_shard)
    for direction, order in (("forward", packs), ("backward", packs[::-1])):
        for ranges in order:
            pack, rows = pack_tokens(ranges, stage), stage.num_rows(ranges)
            given = torch.randn(rows, stage.hidden_size, dtype=stage.dtype, device=stage.device)
            layers = stage.forward_layers if direction == "forward" else stage.backward_layers
            took = clock.time((direction, ranges), functools.partial(layers, pack, given, store))
            yield Sample(direction, ranges, took.device_s, took.host_s)  # type: ignore[arg-type]


def pack_tokens(ranges: tuple[Range, ...], stage: PipelineStage) -> PackTokens:
    """Return a pack of documents of token 0, to time layers without embedding and head."""
    positions = torch.cat([torch.arange(a, b, device=stage.device) for _, a, b in ranges])
    return PackTokens(ranges, torch.zeros_like(positions), torch.zeros_like(positions), positions)


def pack_features(ranges: Sequence[Range], layers: Sequence[LayerShares], tile: int = 1) -> Features:
    """Return the features of one pack on these layers, with attention blocks of `tile` query rows."""
    start, stop = (np.array([r[i] for r in ranges], dtype=np.int64) for i in (1, 2))
    reaches = tuple(dict.fromkeys(layer.reach for layer in layers))
    sums = SliceFeatures(windows=reaches, tile=tile, causal=True).of_slices(start, stop).sum(axis=0)
    linear, attention, keys, _, pieces = np.array(layers, np.float64).T
    at = [reaches.index(layer.reach) for layer in layers]
    pairs = attention * sums[[pairs_column(window) for window in at]]
    prefix = keys * sums[[prefix_column(window) for window in at]]
    tokens, slices = float(sums[0] * linear.mean()), float(len(ranges) * pieces.mean())
    return tokens, slices, 1.0, float(pairs.mean()), float(prefix.mean())


_PASS_SHARE = 0.12  # of the budget, for one pass, so that medians are over several
_MEMORY_SHARE = 0.4  # of the free memory, for what layers keep; the rest is for tensors inside a layer


def choose_rounds(
    stage: PipelineStage, model: ModelSpec, mesh: Mesh, longest: int, budget_s: float, free_bytes: int
) -> list[int]:
    """Choose rounds, as ascending indices into `GRID`, and time each once, which warms caches and allocators up: with
    documents of at most `longest` tokens, but where a coefficient needs longer ones, within a share of the whole
    profile's budget and of the device's bytes free of weights. Collective."""
    order = sorted(
        range(len(GRID)), key=lambda index: (GRID[index] not in NEEDED_ROUNDS, round_flops(GRID[index], model))
    )
    chosen: list[int] = []
    spent_s, last_s, last_flops = 0.0, 0.0, 1.0
    for index in order:
        packs, flops = GRID[index], round_flops(GRID[index], model)
        if not may_run(packs, model):
            continue
        if packs not in NEEDED_ROUNDS:
            if longest_of(packs) > longest or kept_bytes(packs, stage, model, mesh) > _MEMORY_SHARE * free_bytes:
                continue
            if spent_s + last_s * flops / last_flops > _PASS_SHARE * budget_s:
                break
        dist.barrier(group=mesh.control)
        start_s = time.perf_counter()
        list(time_round(stage, packs, PackClock(stage.device)))
        # All ranks decide alike, by the slowest.
        last_s, last_flops = most_of_ranks(time.perf_counter() - start_s, mesh), flops
        spent_s += last_s
        chosen.append(index)
    return sorted(chosen)


def kept_bytes(packs: Packs, stage: PipelineStage, model: ModelSpec, mesh: Mesh) -> float:
    tp = mesh.layout.tp
    token_bytes = mean_of_layers(model, activation_bytes_per_token(model, "replay", tp) + kv_bytes_per_token(model, tp))
    # One layer's bytes again, for its backward.
    return sum(num_tokens_of(packs).values()) * token_bytes * (len(stage.model.layers) + 1)


def shares_of(stage: PipelineStage, timed: ModelSpec, model: ModelSpec) -> tuple[LayerShares, ...]:
    """Return the shares in the model of the layers of a stage of `timed`, which is it or has fewer layers."""
    shares = kind_shares(model)
    columns = *(one.tolist() for one in (shares.linear, shares.attention, shares.keys, shares.pieces)), shares.reach
    of_kinds = [
        LayerShares(one, pairs, keys, reach or 0, pieces)
        for one, pairs, keys, pieces, reach in zip(*columns, strict=True)
    ]
    return tuple(of_kinds[model.kinds.index(timed.kinds[timed.layers[layer]])] for layer in stage.model.layers)
