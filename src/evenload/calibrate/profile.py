"""`profile`: minutes spent on one model and layout, so that predictions of this device come true.

    grid     packs, kernels, transfers that one pass times (`grid_choice`, `pass_work`)
    passes   over all of it, interleaved, so that a busy minute disturbs every timing alike; each pass is kept in a file
    fit      medians over passes, non-negative least squares, k-fold error (`fit`); the attention tile is the one with
             which packs that were left out come out best
    record   curves, residuals, versions and counted bytes beside the coefficients (`cost.profile_record`)

Same rounds, same fit and same transfers as at the start of a run (`calibrate`), of more sizes and for longer. Norms,
rotary embedding and elementwise work are inside `linear_s_per_token`, launches and python of a pack inside `pack_s`:
packs of 16 to 32,768 tokens tell them apart.

Price: at most the minutes that are given, and at least three passes over what coefficients need.
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

from evenload.calibrate.assemble import RankMeasurement, coefficients_of, most_disturbed, pass_timings
from evenload.calibrate.disturbance import CoreWaits
from evenload.calibrate.fit import LeftOut, left_out
from evenload.calibrate.grid_choice import choose_rounds, windows_of
from evenload.calibrate.kernel_timings import matmul_flops_per_s
from evenload.calibrate.memory_counts import activation_bytes, held_and_counted
from evenload.calibrate.overlap import overlap_cost
from evenload.calibrate.partial_file import TIMINGS, PartialProfile, Pass, read_partial, write_partial
from evenload.calibrate.pass_results import DIRECTIONS, PassResults
from evenload.calibrate.pass_work import PassWork
from evenload.calibrate.repeats import num_outliers
from evenload.calibrate.rounds import GRID
from evenload.cost.coefficients import CostCoefficients
from evenload.cost.profile_record import Profile, TimedPack, digest_of
from evenload.runtime.comm.mesh import Mesh, most_of_ranks
from evenload.runtime.replay.stage import PipelineStage
from evenload.types.micropack import Direction
from evenload.types.model import ModelSpec
from evenload.types.token_range import Range

MIN_PASSES, MAX_PASSES = 3, 25
TILES = (1, 16, 32, 64, 128, 256)
"""Query rows of an attention block that are tried."""
# Another tile than 1 must make the error so much smaller; else it explains noise.
_TILE_GAIN = 0.1


@dataclass(frozen=True, kw_only=True)
class ProfileTask:
    """What is measured.

    Args:
        model: in the precision that is timed; timed: the same with the layers that were made, so many a stage.
        tp: devices that share matrices.
        longest: tokens of the longest document that is tried.
        budget_s: of all calls together.
        free_bytes: of the device, beside weights.
        before_bytes: resident memory of the process before the model was made; static_bytes: of its weights and
            gradients.
        demand: threads that ranks compute with for each core, see `CoreWaits`.
        partial: where passes are kept until all are done.
        versions: of what computes, by name.
    """

    model: ModelSpec
    timed: ModelSpec
    layers: int
    tp: int
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
        """Everything that passes of one measurement share, as text."""
        return (
            f"{self.model.name} {self.dtype}, {self.layers} layers, {mesh.layout.describe()}, up to "
            f"{self.longest:,} tokens, {self.device_name}, {stage.backend_name}, timings {TIMINGS}, "
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
    """Measure and fit. Collective over all ranks; every rank returns the same.

    Args:
        stages: of this rank; layers of the first are timed.
        say: a sentence for people; on_pass: passes done, and about how many there will be. Called on all ranks.

    Raises:
        EvenloadError: tokens leave other bytes than the cost model says.
    """
    stage, last = stages[min(stages)], stages[max(stages)]
    counted = activation_bytes(stage, task.timed, mesh.layout.tp)
    found, work, longest_round = _begin(stage, last, task, mesh, say)
    waits, started_s, before_s = CoreWaits(task.demand), time.perf_counter(), found.seconds
    while len(found.passes) < MIN_PASSES or (len(found.passes) < MAX_PASSES and not _is_over(found, task, mesh)):
        mine = work.run()
        everyone: list[Pass] = [mine] * mesh.layout.world_size
        dist.all_gather_object(everyone, mine, group=mesh.control)
        passes = (*found.passes, tuple(everyone))
        spent_s = before_s + time.perf_counter() - started_s
        found = msgspec.structs.replace(found, passes=passes, seconds=spent_s)
        if mesh.rank == 0:
            write_partial(task.partial, found)
        on_pass(len(passes), _expected_passes(found, task))
    results = PassResults(passes=found.passes, layers=task.layers)
    mine = results.measurement(
        mesh.rank, work, windows_of(stage, task.timed), waits.share(), matmul_flops_per_s(stage.device, stage.dtype)
    )
    mine = replace(mine, overlap=overlap_cost(mesh))
    ranks: list[RankMeasurement] = [mine] * mesh.layout.world_size
    dist.all_gather_object(ranks, mine, group=mesh.control)
    disturbed = most_disturbed(ranks)
    if disturbed.is_noisy:
        say(
            f"the machine was disturbed: {disturbed.describe()}. Medians bear some of that; where predictions matter, "
            "measure again once it is quiet"
        )
    tile, errors = _best_tile(ranks)
    fitted = coefficients_of(ranks, task.model, task.device_name, mesh.layout, tile)
    memory = [(counted, held_and_counted(stage, GRID[longest_round], task.before_bytes, task.static_bytes))]
    dist.broadcast_object_list(memory, src=0, group=mesh.control)
    written = [_recorded(fitted, errors, ranks, results, task, stage.backend_name, found, memory[0])]
    dist.broadcast_object_list(written, src=0, group=mesh.control)
    return written[0]


def _begin(
    stage: PipelineStage, last: PipelineStage, task: ProfileTask, mesh: Mesh, say: Callable[[str], None]
) -> tuple[PartialProfile, PassWork, int]:
    """What an earlier call left, or a choice of rounds; the work of a pass, warmed up; and its longest round."""
    began: list[tuple[PartialProfile, str]] = [(PartialProfile(task=""), "")]
    if mesh.rank == 0:
        began[0] = read_partial(task.partial, task.describe(mesh, stage))
    dist.broadcast_object_list(began, src=0, group=mesh.control)
    found, note = began[0]
    if note:
        say(note)
    start_s = time.perf_counter()
    if not found.rounds:
        rounds = choose_rounds(stage, task.timed, mesh, task.longest, task.budget_s, task.free_bytes)
        found = msgspec.structs.replace(found, rounds=tuple(rounds))
    work = PassWork(stage, last, task.timed, mesh, found.rounds)
    if not found.passes:
        rows = [work.choose_beside_rows()]
        dist.broadcast_object_list(rows, src=0, group=mesh.control)
        found = msgspec.structs.replace(found, beside_rows=rows[0])
    work.set_beside_rows(found.beside_rows)
    warm_s = time.perf_counter()
    work.run()
    pass_s = time.perf_counter() - warm_s
    found = msgspec.structs.replace(found, seconds=found.seconds + time.perf_counter() - start_s)
    left = max(1, min(MAX_PASSES, int((task.budget_s - found.seconds) / pass_s)))
    say(
        f"{len(found.rounds)} rounds of packs, kernels and transfers: a pass takes {pass_s:.1f} s, "
        f"{max(left, MIN_PASSES)} more of them about {max(left, MIN_PASSES) * pass_s / 60:.1f} min"
    )
    return found, work, found.rounds[-1]


def _is_over(found: PartialProfile, task: ProfileTask, mesh: Mesh) -> bool:
    """No time for another pass on one of the ranks."""
    pass_s = found.seconds / (len(found.passes) + 1)
    return bool(most_of_ranks(found.seconds + pass_s > task.budget_s, mesh))


def _expected_passes(found: PartialProfile, task: ProfileTask) -> int:
    done = len(found.passes)
    by_time = int(done * task.budget_s / found.seconds) if found.seconds else MAX_PASSES
    return max(done, MIN_PASSES, min(MAX_PASSES, by_time))


def _best_tile(ranks: Sequence[RankMeasurement]) -> tuple[int, dict[Direction, LeftOut]]:
    """The tile whose fits are least off on packs that were left out, and those fits' answers."""
    tried = {}
    for tile in TILES:
        fits = {}
        for direction in DIRECTIONS:
            features, seconds, samples = pass_timings(ranks, direction, tile)
            fits[direction] = left_out(features, seconds, [sample.ranges for sample in samples])
        tried[tile] = fits
    size = {tile: sum(fit.error.median + fit.error.p90 for fit in fits.values()) for tile, fits in tried.items()}
    best = min(TILES, key=lambda tile: size[tile])
    chosen = best if size[best] < (1 - _TILE_GAIN) * size[1] else 1
    return chosen, tried[chosen]


def _recorded(
    fitted: CostCoefficients,
    errors: Mapping[Direction, LeftOut],
    ranks: Sequence[RankMeasurement],
    results: PassResults,
    task: ProfileTask,
    backend: str,
    found: PartialProfile,
    memory: tuple[dict[str, int], tuple[int, int]],
) -> CostCoefficients:
    """Coefficients with what only a profile measures, and its record."""
    curves, embedding = results.curves(), results.embedding_s_per_token()
    shares = [curve.hidden_share for curve in curves if curve.hidden_share is not None]
    disturbed = most_disturbed(ranks)
    repeats = results.all_repeats()
    record = Profile(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        versions=dict(task.versions),
        dtype=task.dtype,
        attention=backend,
        layers=task.layers,
        passes=len(found.passes),
        seconds=found.seconds,
        outliers=sum(map(num_outliers, repeats)),
        timings=sum(map(len, repeats)),
        waited_share=disturbed.waited_share,
        spread=disturbed.spread,
        forward=errors["forward"].error,
        backward=errors["backward"].error,
        packs=tuple(pack for direction in DIRECTIONS for pack in _timed_packs(ranks, direction, errors[direction])),
        kernels=results.rates(task.timed, task.tp),
        transfers=curves,
        activation_bytes=memory[0],
        held_bytes=memory[1][0],
        counted_bytes=memory[1][1],
        has_overlap=fitted.overlap is not None,
    )
    whole = msgspec.structs.replace(
        fitted,
        embedding_s_per_token=fitted.embedding_s_per_token if embedding is None else embedding,
        # Where attention only gets slower beside a transfer, nothing hides; the record has the share as measured.
        context_hidden_share=min(1.0, max(0.0, shares[0])) if shares else fitted.context_hidden_share,
        profile=record,
    )
    return msgspec.structs.replace(whole, profile=msgspec.structs.replace(record, digest=digest_of(whole)))


def _timed_packs(ranks: Sequence[RankMeasurement], direction: Direction, fit: LeftOut) -> Iterator[TimedPack]:
    """Medians over ranks of what was measured and predicted of every pack."""
    _, seconds, samples = pass_timings(ranks, direction, 1)
    found: dict[tuple[Range, ...], list[tuple[float, float]]] = {}
    for sample, measured_s, predicted_s in zip(samples, seconds, fit.seconds.tolist(), strict=True):
        found.setdefault(sample.ranges, []).append((measured_s, predicted_s))
    for ranges, pairs in found.items():
        slices = Counter((r.start, r.stop) for r in ranges)
        measured_s, predicted_s = (statistics.median(column) for column in zip(*pairs, strict=True))
        yield TimedPack(
            direction=direction,
            slices=tuple((start, stop, count) for (start, stop), count in slices.items()),
            measured_s=measured_s,
            left_out_s=predicted_s,
        )
