"""Profile one model and layout for some minutes, so that predictions for this device are accurate.

    grid     packs, kernels and transfers that one pass times (`calibrate.rounds`, `PassWork`)
    passes   over all of it, interleaved, so that a busy minute disturbs every timing alike
    fit      medians over passes, non-negative least squares, k-fold error (`fit`); the attention tile that predicts
             left-out packs best
    record   residuals, versions and counted bytes (`cost.coefficients.Profile`)

A pass holds seconds by name: `pack:<round>:<number>` in the order of `time_round`, on a GPU `queue:<round>:<number>` of
its host, `weights`, `head:<rows>`, `reduction:<ranks>:<bytes>` and so on, each on the ranks that take part. Passes are
kept in a JSON file next to the cost file, from which a second call of the same task goes on.
"""

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import torch.distributed as dist

from evenload.calibrate import kernels
from evenload.calibrate.calibrate import DIRECTIONS, RankMeasurement, coefficients_of, max_noise, pass_timings
from evenload.calibrate.fit import CoreWaits, CrossValidation, cross_validate, num_outliers, spread_of_repeats, timed
from evenload.calibrate.kernels import activation_bytes, held_and_counted, matmul_flops_per_s, time_weights
from evenload.calibrate.links import GRID_BYTES, TransferWork, link_from, overlap_cost, transfers_of
from evenload.calibrate.rounds import (
    GRID,
    LayerShares,
    Sample,
    choose_rounds,
    pack_clock,
    round_flops,
    shares_of,
    time_round,
)
from evenload.cost.coefficients import CostCoefficients, Noise, Profile, TimedPack, digest_of
from evenload.runtime.comm.mesh import Mesh, most_of_ranks
from evenload.runtime.replay.stage import PipelineStage
from evenload.types.base import Frozen
from evenload.types.document import Direction, Range
from evenload.types.model import ModelSpec

Pass = dict[str, float]  # seconds of one rank's pass by what was timed
TIMINGS = 5  # version of what a pass times; a file with another belongs to another task


class PartialProfile(Frozen):
    """Holds the passes of an unfinished profile by pass and rank, the seconds spent so far, what is measured, as text
    (a file of another task is not used), and rounds of the grid, chosen once, so that all passes time the same."""

    task: str
    rounds: tuple[int, ...] = ()
    seconds: float = 0.0
    passes: tuple[tuple[Pass, ...], ...] = ()


def partial_path(output: Path) -> Path:
    return output.with_name(f"{output.name}.partial")


def read_partial(path: Path, task: str) -> tuple[PartialProfile, str]:
    """Return the passes of this task, none where the file is of another or cannot be read, and a message."""
    nothing = PartialProfile(task=task)
    if not path.is_file():
        return nothing, ""
    try:
        partial = msgspec.json.decode(path.read_bytes(), type=PartialProfile)
    except (OSError, msgspec.MsgspecError) as error:
        return nothing, f"{path} cannot be read ({error}): measured from the beginning"
    if partial.task != task:
        return nothing, f"{path} is of another measurement ({partial.task}): measured from the beginning"
    return partial, f"goes on from {path}: {len(partial.passes)} passes, {partial.seconds:.0f} s"


def write_partial(path: Path, partial: PartialProfile) -> None:
    new = path.with_name(f"{path.name}.new")
    new.write_bytes(msgspec.json.encode(partial))
    new.replace(path)


EMBEDDED_ROWS = 2048


class PassWork:
    """Times one rank's share of a pass: layers of a stage and the head of the last, with rounds of `GRID`."""

    def __init__(
        self, stage: PipelineStage, last: PipelineStage, model: ModelSpec, mesh: Mesh, rounds: Sequence[int]
    ) -> None:
        self._stage, self._model, self._mesh, self.rounds = stage, model, mesh, rounds
        device, dtype, tp = stage.device, stage.dtype, mesh.layout.tp
        self._clock = pack_clock(stage, mesh)
        self._kernels: dict[str, Callable[[], object]] = {}
        # Kernels and the head are timed with no more work than layers.
        most_flops = max(round_flops(GRID[index], model) for index in rounds)
        if last.model.is_last:
            heads = kernels.head_work(last, model.vocab_size, kernels.head_rows(model, tp, most_flops))
            self._kernels |= {f"head:{rows}": work for rows, work in heads.items()}
        if stage.model.is_first and tp == 1:
            self._kernels["embedding"] = kernels.embedding_work(stage, model.vocab_size, EMBEDDED_ROWS)
        self._kernels["optimizer"], self.num_parameters = kernels.optimizer_work(mesh.data_size, device)
        self._kernels["copy"], self.copied_bytes = kernels.copy_work(model, tp, device, dtype)
        self.transfers = list(transfers_of(mesh))
        self._calls = [(work, size, work.call(size)) for work in self.transfers for size in GRID_BYTES]

    def run(self) -> Pass:
        """Time everything once. Collective over all ranks."""
        seconds: Pass = {}
        device, control = self._stage.device, self._mesh.control
        for index in self.rounds:
            dist.barrier(group=control)
            for number, sample in enumerate(time_round(self._stage, GRID[index], self._clock)):
                seconds[f"pack:{index}:{number}"] = sample.seconds
                if sample.host_s:
                    seconds[f"queue:{index}:{number}"] = sample.host_s
        seconds["weights"] = time_weights(self._stage, self._clock)
        for name, work in self._kernels.items():
            seconds[name] = timed(work, device)
        dist.barrier(group=control)
        for work, size, call in self._calls:
            if size == GRID_BYTES[0]:
                call()  # waits for late ranks
            seconds[transfer_name(work, size)] = timed(call, device) / work.hops
        dist.barrier(group=control)
        return seconds


def transfer_name(work: TransferWork, num_bytes: int) -> str:
    return f"{work.kind}:{work.ranks}:{num_bytes}"


Repeats = dict[str, list[float]]  # seconds of one rank's passes by what was timed


def _measurement(
    repeats: Repeats, work: PassWork, layers: tuple[LayerShares, ...], waited_share: float, peak_flops_per_s: float
) -> RankMeasurement:
    """Return the medians of one rank's passes through these layers."""
    count, packs = len(layers), []
    median = {name: statistics.median(seconds) for name, seconds in repeats.items()}
    for index in work.rounds:
        for number, (direction, ranges) in enumerate(_order(index)):
            seconds, host_s = median[f"pack:{index}:{number}"], median.get(f"queue:{index}:{number}", 0.0)
            packs.append(Sample(direction, ranges, seconds / count, host_s / count, layers))
    spread = spread_of_repeats([seconds for name, seconds in repeats.items() if name.startswith("pack:")])
    return RankMeasurement(
        noise=Noise(waited_share=waited_share, spread=spread),
        packs=tuple(packs),
        head=tuple((int(name.partition(":")[2]), took) for name, took in median.items() if name.startswith("head:")),
        peak_flops_per_s=peak_flops_per_s,
        optimizer_s=median["optimizer"] / work.num_parameters,
        copy_s_per_byte=median["copy"] / work.copied_bytes,
        weight_s=median["weights"] / sum(layer.linear for layer in layers),
        links={
            transfer.kind: link_from(GRID_BYTES, [median[transfer_name(transfer, size)] for size in GRID_BYTES])
            for transfer in work.transfers
        },
    )


def _order(index: int) -> list[tuple[Direction, tuple[Range, ...]]]:
    packs = GRID[index]
    return [("forward", ranges) for ranges in packs] + [("backward", ranges) for ranges in packs[::-1]]


MIN_PASSES, MAX_PASSES = 3, 25
TILES = (1, 16, 32, 64, 128, 256)  # candidates for the query rows of an attention block
_TILE_GAIN = 0.1  # a tile other than 1 must lower the error by this share; else it explains noise


@dataclass(frozen=True, kw_only=True)
class ProfileTask:
    """Describes what is measured.

    Args:
        model: in the precision that is timed; timed: the same with the layers that were made, so many a stage.
        longest: tokens of the longest document that is timed.
        budget_s: of all calls together.
        free_bytes: of the device, without weights; before_bytes: resident before the model was made; static_bytes: of
            its weights and gradients.
        demand: threads that ranks compute with for each core (`CoreWaits`).
        partial: file of the passes until all are done.
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
    partial: Path
    versions: Mapping[str, str]

    def describe(self, mesh: Mesh, stage: PipelineStage) -> str:
        """Describe everything that passes of one measurement share, as text."""
        return (
            f"{self.model.name} {self.dtype}, {self.layers} layers, {mesh.layout.describe()}, up to "
            f"{self.longest:,} tokens, {self.device_name}, {stage.backend.name}, timings {TIMINGS}, "
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
    partial, work = _begin(stage, last, task, mesh, say)
    waits, started_s, before_s = CoreWaits(task.demand), time.perf_counter(), partial.seconds
    while len(partial.passes) < MIN_PASSES or (len(partial.passes) < MAX_PASSES and not _is_over(partial, task, mesh)):
        mine = work.run()
        everyone: list[Pass] = [mine] * mesh.layout.world_size
        dist.all_gather_object(everyone, mine, group=mesh.control)
        passes = (*partial.passes, tuple(everyone))
        spent_s = before_s + time.perf_counter() - started_s
        partial = msgspec.structs.replace(partial, passes=passes, seconds=spent_s)
        if mesh.rank == 0:
            write_partial(task.partial, partial)
        on_pass(len(passes), _expected_passes(partial, task))
    repeats: list[Repeats] = [
        {name: [one[rank][name] for one in partial.passes] for name in partial.passes[0][rank]}
        for rank in range(len(partial.passes[0]))
    ]
    layers, flops_per_s = shares_of(stage, task.timed, task.model), matmul_flops_per_s(stage.device, stage.dtype)
    mine = _measurement(repeats[mesh.rank], work, layers, waits.share(), flops_per_s)
    mine = replace(mine, overlap=overlap_cost(mesh))
    ranks: list[RankMeasurement] = [mine] * mesh.layout.world_size
    dist.all_gather_object(ranks, mine, group=mesh.control)
    noise = max_noise(ranks)
    if noise.is_noisy:
        say(
            f"the machine was disturbed: {noise.describe()}. Medians bear some of that; where predictions matter, "
            "measure again once it is quiet"
        )
    tile, errors = _best_tile(ranks)
    fitted = coefficients_of(ranks, task.model, task.device_name, mesh.layout, tile, is_cpu=mesh.device.type == "cpu")
    memory = counted, held_and_counted(stage, GRID[partial.rounds[-1]], task.before_bytes, task.static_bytes)
    written = [_recorded(fitted, errors, ranks, repeats, task, stage.backend.name, partial, memory)]
    dist.broadcast_object_list(written, src=0, group=mesh.control)
    return written[0]


def _begin(
    stage: PipelineStage, last: PipelineStage, task: ProfileTask, mesh: Mesh, say: Callable[[str], None]
) -> tuple[PartialProfile, PassWork]:
    began = [
        read_partial(task.partial, task.describe(mesh, stage)) if mesh.rank == 0 else (PartialProfile(task=""), "")
    ]
    dist.broadcast_object_list(began, src=0, group=mesh.control)
    partial, message = began[0]
    if message:
        say(message)
    start_s = time.perf_counter()
    if not partial.rounds:
        rounds = choose_rounds(stage, task.timed, mesh, task.longest, task.budget_s, task.free_bytes)
        partial = msgspec.structs.replace(partial, rounds=tuple(rounds))
    work = PassWork(stage, last, task.timed, mesh, partial.rounds)
    warm_s = time.perf_counter()
    work.run()
    pass_s = time.perf_counter() - warm_s
    partial = msgspec.structs.replace(partial, seconds=partial.seconds + time.perf_counter() - start_s)
    left = max(MIN_PASSES, min(MAX_PASSES, int((task.budget_s - partial.seconds) / pass_s)))
    say(
        f"{len(partial.rounds)} rounds of packs, kernels and transfers: a pass takes {pass_s:.1f} s, {left} more of "
        f"them about {left * pass_s / 60:.1f} min"
    )
    return partial, work


def _is_over(partial: PartialProfile, task: ProfileTask, mesh: Mesh) -> bool:
    pass_s = partial.seconds / (len(partial.passes) + 1)
    return bool(most_of_ranks(partial.seconds + pass_s > task.budget_s, mesh))


def _expected_passes(partial: PartialProfile, task: ProfileTask) -> int:
    done = len(partial.passes)
    by_time = int(done * task.budget_s / partial.seconds) if partial.seconds else MAX_PASSES
    return max(done, MIN_PASSES, min(MAX_PASSES, by_time))


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


def _recorded(
    fitted: CostCoefficients,
    errors: Mapping[Direction, CrossValidation],
    ranks: Sequence[RankMeasurement],
    repeats: Sequence[Repeats],
    task: ProfileTask,
    backend: str,
    partial: PartialProfile,
    memory: tuple[dict[str, int], tuple[int, int]],
) -> CostCoefficients:
    all_repeats = [seconds for one in repeats for seconds in one.values()]
    # Of rows forward and backward.
    embedding_s = [statistics.median(one["embedding"]) / EMBEDDED_ROWS / 2 for one in repeats if "embedding" in one]
    record = Profile(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        versions=dict(task.versions),
        dtype=task.dtype,
        attention=backend,
        layers=task.layers,
        passes=len(partial.passes),
        seconds=partial.seconds,
        outliers=sum(map(num_outliers, all_repeats)),
        timings=sum(map(len, all_repeats)),
        forward=errors["forward"].error,
        backward=errors["backward"].error,
        packs=tuple(pack for direction in DIRECTIONS for pack in _timed_packs(ranks, direction, errors[direction])),
        activation_bytes=memory[0],
        held_bytes=memory[1][0],
        counted_bytes=memory[1][1],
        has_overlap=fitted.overlap is not None,
    )
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
