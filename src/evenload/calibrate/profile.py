"""Profile one model and layout for some minutes, so that predictions for this device are accurate.

    grid     packs, kernels and transfers that one pass times (`calibrate.rounds`, `PassWork`)
    passes   over all of it, interleaved, so that a busy minute disturbs every timing alike
    fit      medians over passes, non-negative least squares, k-fold error (`fit`); the attention tile that predicts
             left-out packs best
    record   residuals, versions and counted bytes (`cost.coefficients.Profile`)

Every rank times its own layers, and the kernels and transfers that it takes part in.
"""

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import NamedTuple

import msgspec
import torch.distributed as dist

from evenload.calibrate import kernels
from evenload.calibrate.calibrate import DIRECTIONS, RankMeasurement, coefficients_of, max_noise, pass_timings
from evenload.calibrate.fit import CoreWaits, CrossValidation, cross_validate, num_outliers, spread_of_repeats, timed
from evenload.calibrate.kernels import activation_bytes, held_and_counted, matmul_flops_per_s, time_weights
from evenload.calibrate.links import GRID_BYTES, TransferKind, link_from, overlap_cost, transfers_of
from evenload.calibrate.rounds import (
    GRID,
    LayerShares,
    Sample,
    choose_rounds,
    median_sample,
    pack_clock,
    round_flops,
    shares_of,
    time_round,
)
from evenload.cost.coefficients import CostCoefficients, Noise, Profile, TimedPack, digest_of
from evenload.runtime.comm.mesh import Mesh, gather_from_all, most_of_ranks, share_of_first
from evenload.runtime.replay.stage import PipelineStage
from evenload.types.document import Direction, Range
from evenload.types.model import ModelSpec

EMBEDDED_ROWS = 2048


class Pass(NamedTuple):
    """Holds what one rank timed in a pass: packs in the order of `time_round`, and seconds of kernels and transfers, of
    a head by its rows, of a transfer a hop by its kind and bytes."""

    packs: tuple[Sample, ...]
    kernels: dict[str | int | tuple[TransferKind, int], float]


class PassWork:
    """Times one rank's share of a pass: layers of a stage and the head of the last, with rounds of `GRID`."""

    def __init__(
        self, stage: PipelineStage, last: PipelineStage, model: ModelSpec, mesh: Mesh, rounds: Sequence[int]
    ) -> None:
        self._stage, self._mesh, self._rounds = stage, mesh, rounds
        device, dtype, tp = stage.device, stage.dtype, mesh.layout.tp
        self._clock = pack_clock(stage, mesh)
        self._kernels: dict[str | int, Callable[[], object]] = {}
        # Kernels and the head are timed with no more work than layers.
        most_flops = max(round_flops(GRID[index], model) for index in rounds)
        if last.model.is_last:
            heads = kernels.head_work(last, model.vocab_size, kernels.head_rows(model, tp, most_flops))
            self._kernels.update(heads.items())
        if stage.model.is_first and tp == 1:
            self._kernels["embedding"] = kernels.embedding_work(stage, model.vocab_size, EMBEDDED_ROWS)
        self._kernels["optimizer"], self.num_parameters = kernels.optimizer_work(mesh.data_size, device)
        self._kernels["copy"], self.copied_bytes = kernels.copy_work(model, tp, device, dtype)
        self.transfers = list(transfers_of(mesh))
        self._calls = [(work, size, work.call(size)) for work in self.transfers for size in GRID_BYTES]

    def run(self) -> Pass:
        """Time everything once. Collective over all ranks."""
        device, control = self._stage.device, self._mesh.control
        packs: list[Sample] = []
        for index in self._rounds:
            dist.barrier(group=control)
            packs += time_round(self._stage, GRID[index], self._clock)
        seconds: dict[str | int | tuple[TransferKind, int], float] = {"weights": time_weights(self._stage, self._clock)}
        seconds |= {name: timed(work, device) for name, work in self._kernels.items()}
        dist.barrier(group=control)
        for work, size, call in self._calls:
            if size == GRID_BYTES[0]:
                call()  # waits for late ranks
            seconds[work.kind, size] = timed(call, device) / work.hops
        dist.barrier(group=control)
        return Pass(tuple(packs), seconds)


class RankProfile(NamedTuple):
    """Holds one rank's medians over passes, how many of its repeats lie far off and how many there are, and seconds of
    a row of the embedding forward and backward, where it has one."""

    measurement: RankMeasurement
    outliers: int
    timings: int
    embedding_s: float | None


def _rank_profile(
    passes: Sequence[Pass], work: PassWork, layers: tuple[LayerShares, ...], waited_share: float, stage: PipelineStage
) -> RankProfile:
    """Return what one rank's passes through these layers of a stage say."""
    count = len(layers)
    of_packs = list(zip(*(one.packs for one in passes), strict=True))
    packs_s = [[one.seconds for one in repeats] for repeats in of_packs]
    hosts_s = [[one.host_s for one in repeats] for repeats in of_packs if repeats[0].host_s]
    kernels_s = {name: [one.kernels[name] for one in passes] for name in passes[0].kernels}
    median = {name: statistics.median(seconds) for name, seconds in kernels_s.items()}
    packs = [
        Sample(one.direction, one.ranges, one.seconds / count, one.host_s / count, layers)
        for one in map(median_sample, of_packs)
    ]
    measurement = RankMeasurement(
        noise=Noise(waited_share=waited_share, spread=spread_of_repeats(packs_s)),
        packs=tuple(packs),
        head=tuple((rows, took) for rows, took in median.items() if isinstance(rows, int)),
        peak_flops_per_s=matmul_flops_per_s(stage.device, stage.dtype),
        optimizer_s=median["optimizer"] / work.num_parameters,
        copy_s_per_byte=median["copy"] / work.copied_bytes,
        weight_s=median["weights"] / sum(layer.linear for layer in layers),
        links={
            one.kind: link_from(GRID_BYTES, [median[one.kind, size] for size in GRID_BYTES]) for one in work.transfers
        },
    )
    repeats = [*packs_s, *hosts_s, *kernels_s.values()]
    embedding_s = median["embedding"] / EMBEDDED_ROWS / 2 if "embedding" in median else None
    return RankProfile(measurement, sum(map(num_outliers, repeats)), sum(map(len, repeats)), embedding_s)


MIN_PASSES, MAX_PASSES = 3, 25
TILES = (1, 16, 32, 64, 128, 256)  # candidates for the query rows of an attention block
_TILE_GAIN = 0.1  # a tile other than 1 must lower the error by this share; else it explains noise


@dataclass(frozen=True, kw_only=True)
class ProfileTask:
    """Describes what is measured.

    Args:
        model: in the precision that is timed; timed: the same with the layers that were made, so many a stage.
        longest: tokens of the longest document that is timed.
        budget_s: of all passes together.
        free_bytes: of the device, without weights; before_bytes: resident before the model was made; static_bytes: of
            its weights and gradients.
        demand: threads that ranks compute with for each core (`CoreWaits`).
    """

    model: ModelSpec
    timed: ModelSpec
    layers: int
    device_name: str
    dtype: str
    longest: int
    budget_s: float
    free_bytes: int
    before_bytes: int
    static_bytes: int
    demand: float
    versions: Mapping[str, str]

    def describe(self, mesh: Mesh, stage: PipelineStage) -> str:
        return (
            f"{self.model.name} {self.dtype}, {self.layers} layers, {mesh.layout.describe()}, up to "
            f"{self.longest:,} tokens, {self.device_name}, {stage.backend.name}, "
            + ", ".join(f"{name} {number}" for name, number in self.versions.items())
        )


def profile(
    stages: Mapping[int, PipelineStage],
    task: ProfileTask,
    mesh: Mesh,
    *,
    say: Callable[[str], None],
    on_pass: Callable[[int, int], None],
) -> CostCoefficients:
    """Measure and fit; every rank returns the same. Collective over all ranks.

    Args:
        stages: of this rank; layers of the first are timed.
        say: gets messages; on_pass: passes done, and about how many there will be. Called on all ranks.

    Raises:
        EvenloadError: layers keep other bytes than the cost model predicts.
    """
    stage, last = stages[min(stages)], stages[max(stages)]
    counted = activation_bytes(stage, task.timed, mesh.layout.tp)
    started_s = time.perf_counter()
    rounds = choose_rounds(stage, task.timed, mesh, task.longest, task.budget_s, task.free_bytes)
    work = PassWork(stage, last, task.timed, mesh, rounds)
    warm_s = time.perf_counter()
    work.run()
    pass_s = time.perf_counter() - warm_s
    left = max(MIN_PASSES, min(MAX_PASSES, int((task.budget_s - (time.perf_counter() - started_s)) / pass_s)))
    say(
        f"{len(rounds)} rounds of packs, kernels and transfers: a pass takes {pass_s:.1f} s, {left} more of them about "
        f"{left * pass_s / 60:.1f} min"
    )
    waits, passes, spent_s = CoreWaits(task.demand), [], time.perf_counter() - started_s
    while len(passes) < MIN_PASSES or (len(passes) < MAX_PASSES and not _is_over(spent_s, len(passes), task, mesh)):
        passes.append(work.run())
        spent_s = time.perf_counter() - started_s
        expected = min(MAX_PASSES, int(len(passes) * task.budget_s / spent_s))
        on_pass(len(passes), max(len(passes), MIN_PASSES, expected))
    mine = _rank_profile(passes, work, shares_of(stage, task.timed, task.model), waits.share(), stage)
    mine = mine._replace(measurement=replace(mine.measurement, overlap=overlap_cost(mesh)))
    everyone = gather_from_all(mine, mesh, "the profiled times")
    ranks = [one.measurement for one in everyone]
    noise = max_noise(ranks)
    if noise.is_noisy:
        say(
            f"the machine was disturbed: {noise.describe()}. Medians bear some of that; where predictions matter, "
            "measure again once it is quiet"
        )
    tile, errors = _best_tile(ranks)
    fitted = coefficients_of(ranks, task.model, task.device_name, mesh.layout, tile, is_cpu=mesh.device.type == "cpu")
    held_bytes, counted_bytes = held_and_counted(stage, GRID[rounds[-1]], task.before_bytes, task.static_bytes)
    record = Profile(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        versions=dict(task.versions),
        dtype=task.dtype,
        attention=stage.backend.name,
        layers=task.layers,
        passes=len(passes),
        seconds=spent_s,
        outliers=sum(one.outliers for one in everyone),
        timings=sum(one.timings for one in everyone),
        forward=errors["forward"].error,
        backward=errors["backward"].error,
        packs=tuple(pack for direction in DIRECTIONS for pack in _timed_packs(ranks, direction, errors[direction])),
        activation_bytes=counted,
        held_bytes=held_bytes,
        counted_bytes=counted_bytes,
        has_overlap=fitted.overlap is not None,
    )
    embedding_s = [one.embedding_s for one in everyone if one.embedding_s is not None]
    return share_of_first(_recorded(fitted, record, embedding_s), mesh)


def _is_over(spent_s: float, num_passes: int, task: ProfileTask, mesh: Mesh) -> bool:
    """Say whether another pass, of the mean time so far, would exceed the budget on any rank."""
    return bool(most_of_ranks(spent_s + spent_s / (num_passes + 1) > task.budget_s, mesh))


def _best_tile(ranks: Sequence[RankMeasurement]) -> tuple[int, dict[Direction, CrossValidation]]:
    tried = {}
    for tile in TILES:
        fits = {}
        for direction in DIRECTIONS:
            features, seconds, samples = pass_timings(ranks, direction, tile)
            fits[direction] = cross_validate(features, seconds, [sample.ranges for sample in samples])
        tried[tile] = fits
    size = {tile: sum(fit.error.median + fit.error.p90 for fit in fits.values()) for tile, fits in tried.items()}
    best = min(TILES, key=lambda tile: size[tile])
    chosen = best if size[best] < (1 - _TILE_GAIN) * size[1] else 1
    return chosen, tried[chosen]


def _recorded(fitted: CostCoefficients, record: Profile, embedding_s: Sequence[float]) -> CostCoefficients:
    """Return the coefficients with what ranks measured of the embedding, and the record, sealed by its digest."""
    whole = msgspec.structs.replace(
        fitted,
        embedding_s_per_token=statistics.median(embedding_s) if embedding_s else fitted.embedding_s_per_token,
        profile=record,
    )
    return msgspec.structs.replace(whole, profile=msgspec.structs.replace(record, digest=digest_of(whole)))


def _timed_packs(ranks: Sequence[RankMeasurement], direction: Direction, fit: CrossValidation) -> Iterator[TimedPack]:
    _, seconds, samples = pass_timings(ranks, direction, 1)
    by_ranges: dict[tuple[Range, ...], list[tuple[float, float]]] = {}
    for sample, measured_s, predicted_s in zip(samples, seconds, fit.seconds.tolist(), strict=True):
        by_ranges.setdefault(sample.ranges, []).append((measured_s, predicted_s))
    for ranges, pairs in by_ranges.items():
        slices = Counter((r.start, r.stop) for r in ranges)
        measured_s, predicted_s = (statistics.median(column) for column in zip(*pairs, strict=True))
        yield TimedPack(
            direction=direction,
            slices=tuple((start, stop, count) for (start, stop), count in slices.items()),
            measured_s=measured_s,
            left_out_s=predicted_s,
        )
