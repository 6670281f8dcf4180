"""Packs that are timed, and one round of them through the layers of a stage.

A round is a few documents, each cut alike: all packs forward, then backward in reverse order, as a step runs them.
Between them rounds vary tokens, slices, pairs and prefix independently, which the fit needs. Two grids:

    QUICK_ROUNDS  at the start of a run, up to 4,096 tokens; on a GPU `rounds_up_to` its largest pack too
    GRID          of `evenload profile`: these and what real packs look like (documents of mixed lengths, short ones
                  beside a slice of a long one), cuts at several prefixes, rows that do not fill a kernel's tiles, and
                  documents of up to 32,768 tokens

Features are those of the cost model (`cost.coefficients`): tokens, slices, 1, pairs, prefix; pairs and prefix by the
windows of the layers that are timed, and with a kernel's tiles, where it has any.
"""

import functools
import statistics
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from evenload.calibrate.pack_clock import PackClock
from evenload.cost.flops import slice_pairs
from evenload.runtime.replay.pack_tokens import PackTokens
from evenload.runtime.replay.stage import PipelineStage
from evenload.runtime.replay.store import ActivationStore
from evenload.types.micropack import Direction
from evenload.types.model import ModelSpec
from evenload.types.token_range import Range

Packs = tuple[tuple[Range, ...], ...]
"""The packs of one round in forward order; they hold whole documents."""
Features = tuple[float, float, float, float, float]
"""[tokens, slices, 1, pairs, prefix] of one pack on one layer, on average over the layers of a stage."""

_GPU_LAYERS = 4
"""Forward and backward of so many layers are some 150 and 420 kernels; a device's queue holds 1,024."""


class Sample(NamedTuple):
    """One timed pack on one layer, or on all that were timed where it says so.

    Args:
        seconds: of the device; host_s: until its host had queued the pack, 0 where they are one (`pack_clock`).
        windows: of the layers that were timed, 0 = full.
    """

    direction: Direction
    ranges: tuple[Range, ...]
    seconds: float
    host_s: float = 0.0
    windows: tuple[int, ...] = (0,)


Timed = tuple[Direction, tuple[Range, ...]]
"""Which pack was timed, in which direction."""


def median_sample(repeats: Sequence[Sample]) -> Sample:
    """Of repeats of one pack."""
    return repeats[0]._replace(
        seconds=statistics.median(one.seconds for one in repeats),
        host_s=statistics.median(one.host_s for one in repeats),
    )


def whole(*lengths: int) -> Packs:
    """One pack of whole documents."""
    return (tuple(Range(doc, 0, length) for doc, length in enumerate(lengths)),)


def cut(*cuts: int, beside: Sequence[int] = ()) -> Packs:
    """A document cut into packs at (0, ...) `cuts`; whole documents of the lengths `beside` lie in the last one."""
    packs: list[tuple[Range, ...]] = [(Range(0, start, stop),) for start, stop in zip((0, *cuts), cuts, strict=False)]
    packs[-1] += tuple(Range(doc, 0, length) for doc, length in enumerate(beside, start=1))
    return tuple(packs)


def num_tokens_of(packs: Packs) -> dict[int, int]:
    """Tokens of every document."""
    lengths: dict[int, int] = {}
    for doc, _, stop in (r for pack in packs for r in pack):
        lengths[doc] = max(lengths.get(doc, 0), stop)
    return lengths


def longest_of(packs: Packs) -> int:
    return max(num_tokens_of(packs).values())


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
    cut(2048, beside=(300, 200, 100)),
    cut(3072, 4096, beside=(512, 256, 128, 64)),
    whole(8192),
    cut(7168, 8192),
    cut(4096, 8192),
    cut(7936, 8192, beside=(900, 300, 60)),
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
    """What comes behind `QUICK_ROUNDS` on a device that only larger packs keep busy: packs of twice as many tokens
    each, up to a run's largest, of short documents, of one whole document, and of the end of one behind a prefix."""
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
    """Of the forward on a layer without a window."""
    start, stop = (np.array([r[i] for pack in packs for r in pack], dtype=np.int64) for i in (1, 2))
    pairs, tokens = float(slice_pairs(start, stop, 0).sum()), float((stop - start).sum())
    return 2.0 * model.linear_parameters_per_layer * tokens + 4.0 * model.num_heads * model.head_dim * pairs


def part_of(stage: PipelineStage, windows: Sequence[int], most: int) -> PipelineStage:
    """A stage of its first layers, at most so many and one of every window at least: seconds of one layer are those of
    another, a device's queue holds the kernels of few, and large packs keep little memory on few.

    Args:
        windows: of all layers of the model, 0 = full.
    """
    layers = list(stage.model.layers)
    first = {windows[index]: index for index in reversed(layers)}
    chosen = {*layers[:most]} if len({windows[index] for index in layers[:most]}) == len(first) else {*first.values()}
    return stage if len(chosen) == len(layers) else stage.with_layers(sorted(chosen))


def timed_part(stage: PipelineStage, windows: Sequence[int]) -> PipelineStage:
    """The layers of a stage that packs of `QUICK_ROUNDS` are timed on."""
    return part_of(stage, windows, _GPU_LAYERS) if stage.device.type == "cuda" else stage


def time_round(stage: PipelineStage, packs: Packs, clock: PackClock) -> Iterator[Sample]:
    """Forward pack by pack, backward in reverse; seconds of all layers. Adds to gradients."""
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
    """Of documents of token 0, for layers that are timed by themselves."""
    positions = torch.cat([torch.arange(a, b, device=stage.device) for _, a, b in ranges])
    return PackTokens(ranges, torch.zeros_like(positions), torch.zeros_like(positions), positions)


def pack_features(ranges: Sequence[Range], windows: Sequence[int], tile: int = 1) -> Features:
    """Of one pack, as `cost.pack_cost` counts them.

    Args:
        windows: of every layer that was timed, 0 = full.
        tile: query rows of one attention block; an incomplete one costs a whole one.
    """
    start, stop = (np.array([r[i] for r in ranges], dtype=np.int64) for i in (1, 2))
    missing_rows = -(stop - start) % tile
    pairs, prefix = [], []
    for window in windows:
        last_row_keys = np.minimum(stop, window) if window else stop
        pairs.append((slice_pairs(start, stop, window) + missing_rows * last_row_keys).sum())
        prefix.append((np.minimum(start, window) if window else start).sum())
    tokens = (stop - start).sum()
    return (float(tokens), float(len(start)), 1.0, float(np.mean(pairs)), float(np.mean(prefix)))
