"""Compare what was measured of strategies on the same global batches with each other and with what was predicted.

Errors are signed, predicted / measured - 1. A pack's seconds are those of one pack on one stage in one direction (I and
W of a split backward apart), a step's those of the slowest rank, medians over rounds. Predicted seconds of packs hold
what overlapped reduce-scatters and all-gathers take (`explore.timelines`).
"""

from statistics import median
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from evenload.cost.coefficients import CostCoefficients
from evenload.cost.memory import HostMemory
from evenload.explore.prediction_interval import PredictionInterval, prediction_interval
from evenload.planning.problem import PlanOptions
from evenload.planning.strategies.strategy import LeftOutStrategy
from evenload.types.base import Frozen
from evenload.types.layout import ParallelLayout
from evenload.types.model import ModelSpec
from evenload.types.plan import PackTimes, StepPlan
from evenload.types.timeline import KINDS, Timeline

QUIET_WAITED_SHARE, QUIET_SPREAD = 0.05, 0.35
"""At most these where nothing else disturbed a measurement: share of the time without a core, and (slowest - fastest) /
median of rounds."""
CLOSE = 0.05  # strategies whose measured step times differ by less are as fast as each other
FACTOR_ERROR = 0.1
"""Of a predicted factor between two strategies, within which 19 of 20 in benchmarks/accuracy are on a quiet machine."""
Verdict = Literal["agrees", "disagrees", "cannot tell"]


class PackErrors(Frozen):
    """Errors of the predicted seconds of the packs of a step, over all stages and both directions.

    Args:
        median: signed.
        median_abs, p90_abs: of absolute values.
        total: signed, of all packs' seconds together; what is left of a step's error lies between packs.
        measured_s, predicted_s: seconds of a pack, medians.
        repeat_p90: 90th percentile of how far a pack's seconds in one round lie from its median over the rounds,
            relative: no prediction can be held to less. 0 for one round.
    """

    median: float
    median_abs: float
    p90_abs: float
    total: float
    measured_s: float
    predicted_s: float
    repeat_p90: float


class BatchRun(Frozen):
    """One global batch, by its number, under one strategy.

    Args:
        documents, tokens: trained, padding not counted.
        num_packs: forward packs of the replica that has most.
        measured_s: step seconds of every round, of the slowest rank.
        measured_peak_bytes, predicted_peak_bytes: of the fullest rank; on a CPU, where no allocator counts, of what the
            activation stores hold and what stays for the step, without the buffers of a running action.
        loss: mean over the batch's label tokens.
    """

    batch: int
    plan_digest: str
    documents: int
    tokens: int
    num_packs: int
    measured_s: tuple[float, ...]
    predicted_s: float
    packs: PackErrors
    measured_peak_bytes: int
    predicted_peak_bytes: int
    loss: float

    @property
    def step_time_s(self) -> float:
        return median(self.measured_s)

    @property
    def error(self) -> float:
        return self.predicted_s / self.step_time_s - 1

    @property
    def memory_error(self) -> float:
        return self.predicted_peak_bytes / self.measured_peak_bytes - 1

    @property
    def spread(self) -> float:
        """Return what rounds differ by: (slowest - fastest) / median."""
        return (max(self.measured_s) - min(self.measured_s)) / self.step_time_s


class StrategyRuns(Frozen):
    """All batches under one strategy; seconds are means over the batches."""

    strategy: str
    batches: tuple[BatchRun, ...]

    @property
    def measured_s(self) -> float:
        return sum(run.step_time_s for run in self.batches) / len(self.batches)

    @property
    def predicted_s(self) -> float:
        return sum(run.predicted_s for run in self.batches) / len(self.batches)

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1

    @property
    def spread(self) -> float:
        """Return what rounds of the whole set of batches differ by: (slowest - fastest) / median."""
        rounds = np.array([run.measured_s for run in self.batches]).sum(axis=0)
        return float((rounds.max() - rounds.min()) / np.median(rounds))

    @property
    def tokens_per_s(self) -> float:
        return sum(run.tokens for run in self.batches) / (self.measured_s * len(self.batches))


class MachineLoad(Frozen):
    """What the machine had to do while steps were measured.

    Args:
        demand: threads that compute for each core that they may use; above 1, ranks take cores from each other.
        waited_share: share of the time in which a rank's busiest thread stood ready without a core beyond that; of the
            rank that waited longest. A quiet machine stays near 0.
    """

    demand: float
    waited_share: float

    def is_quiet(self, spread: float) -> bool:
        """Say whether nothing else kept the machine busy while rounds were measured that differ by `spread`."""
        return self.waited_share <= QUIET_WAITED_SHARE and spread <= QUIET_SPREAD


def verdict(predicted: float, low: float | None, high: float | None, *, is_quiet: bool) -> Verdict:
    """Judge a predicted factor by the 95 % interval of the measured one: it agrees where all of the interval lies
    within `FACTOR_ERROR` of it, and disagrees where none does, or where the other strategy is surely the faster one;
    else, on a machine that was busy, and where nothing was repeated, nobody can tell."""
    if low is None or high is None or not is_quiet:
        return "cannot tell"
    least, most = predicted / (1 + FACTOR_ERROR), predicted * (1 + FACTOR_ERROR)
    is_opposite = (low > 1 and predicted * (1 + CLOSE) < 1) or (high < 1 and predicted > 1 + CLOSE)
    if high < least or low > most or is_opposite:
        return "disagrees"
    return "agrees" if least <= low and high <= most else "cannot tell"


class MeasuredRatio(Frozen):
    """How many times as long steps of one strategy took as those of another, with the 95 % interval by what repeats
    differ by, None where each step was measured once; in every round, as predicted, and whether that is right."""

    one: str
    other: str
    ratio: float
    low: float | None
    high: float | None
    rounds: tuple[float, ...]
    predicted: float
    verdict: Verdict

    @property
    def by_round(self) -> str:
        return f"{self.other} over {self.one} by round: {', '.join(f'{one:.2f}' for one in self.rounds)}"

    @property
    def is_clear(self) -> bool:
        """Say whether the repeats show which one is slower, in the figures that are shown."""
        return self.low is not None and self.high is not None and (round(self.low, 2) > 1 or round(self.high, 2) < 1)

    def describe(self) -> str:
        """Describe the ratio in a sentence without its full stop, with no order that the repeats do not support."""
        if self.low is None or self.high is None:
            return f"each step was measured once, which does not tell whether {self.one} or {self.other} is faster"
        interval, than = f"{self.low:.2f} to {self.high:.2f}", f"times as long as {self.other}"
        if self.is_clear:
            return f"{self.one} takes {self.ratio:.2f} {than} (95 % interval {interval})"
        is_equal = self.low > 1 / (1 + CLOSE) and self.high < 1 + CLOSE
        start = "as fast as each other" if is_equal else "this machine is too noisy to tell"
        return f"{start}: {self.one} takes {interval} {than} (95 % interval)"


def measured_ratio(
    one: StrategyRuns, other: StrategyRuns, comparisons: int = 1, *, is_quiet: bool = True
) -> MeasuredRatio:
    """Compare step times of one strategy with those of another, measured in turn in the same rounds.

    A neighbour that slows a round slows both, so what counts is by how much ln(one / other) of a batch differs between
    rounds: from that deviation follows the error of medians of so many rounds (sqrt(pi / 2) times that of means), and
    with Student's factor the interval.

    Args:
        comparisons: that are made at once and shall all be right with 95 % probability (Bonferroni).
        is_quiet: predictions can be held against what was measured.
    """
    ones, others = (np.array([run.measured_s for run in runs.batches]) for runs in (one, other))
    ratio, predicted, low, high = one.measured_s / other.measured_s, one.predicted_s / other.predicted_s, None, None
    logs = np.log(ones) - np.log(others)
    batches, rounds = logs.shape
    if rounds > 1:
        from scipy.special import stdtrit

        freedom = batches * (rounds - 1)
        variance = ((logs - logs.mean(axis=1, keepdims=True)) ** 2).sum() / freedom
        shares = np.array([run.step_time_s for run in other.batches]) / (batches * other.measured_s)
        error = np.sqrt(variance * np.pi / 2 * (shares**2).sum() / rounds)
        factor = float(np.exp(stdtrit(freedom, 1 - 0.025 / comparisons) * error))
        low, high = ratio / factor, ratio * factor
    return MeasuredRatio(
        one=one.strategy,
        other=other.strategy,
        ratio=ratio,
        low=low,
        high=high,
        rounds=tuple((ones.sum(axis=0) / others.sum(axis=0)).tolist()),
        predicted=predicted,
        verdict=verdict(predicted, low, high, is_quiet=is_quiet),
    )


class RecordedBatch(Frozen):
    """A global batch: its number in the run, which is part of a plan's digest, and (id, tokens, tokens with labels) of
    its documents in the order of arrival."""

    step: int
    documents: tuple[tuple[int, int, int], ...]


class BenchInputs(Frozen):
    """Everything, but the costs, from which the same plans are made again.

    Args:
        options: the tables of `plan.options` in a configuration, the limit of packs filled in.
        memory_cap_bytes: of one process.
        host: main memory of a machine for what is offloaded.
        batches: numbered as in the result.
    """

    model: ModelSpec
    layout: ParallelLayout
    options: dict[str, Any]
    memory_cap_bytes: int
    batches: tuple[RecordedBatch, ...]
    host: HostMemory


def recorded_batch(plan: StepPlan) -> RecordedBatch:
    rows = ((one.doc_id, one.num_tokens, one.num_label_tokens) for one in plan.documents)
    return RecordedBatch(step=plan.step, documents=tuple(rows))


def option_tables_of(options: PlanOptions) -> dict[str, Any]:
    """Return options as a configuration writes them down: own options of strategies in tables of their names."""
    shared = msgspec.to_builtins(options)
    own = {one.pop("strategy"): one for one in shared.pop("strategies")}
    return shared | own


class BenchResult(Frozen):
    """A comparison of strategies on the same global batches.

    Args:
        facts: what ran on what, in the order in which they are shown.
        runs: in the order asked for.
        left_out: strategies that could not run these batches, or that 'all' leaves out.
        loss_difference: the most that the loss of a batch differs between strategies, relative.
        ratios: of the strategies, in the order asked for, to that of the shortest mean step time; made from `runs`.
    """

    facts: tuple[tuple[str, str], ...]
    runs: tuple[StrategyRuns, ...]
    left_out: tuple[LeftOutStrategy, ...]
    loss_difference: float
    load: MachineLoad
    coefficients: CostCoefficients
    inputs: BenchInputs
    ratios: tuple[MeasuredRatio, ...] = ()

    def __post_init__(self) -> None:
        fastest = min(self.runs, key=lambda one: one.measured_s)
        others, is_quiet = [one for one in self.runs if one is not fastest], bool(self.compare_with_interval()[1])
        ratios = tuple(measured_ratio(one, fastest, len(others), is_quiet=is_quiet) for one in others)
        msgspec.structs.force_setattr(self, "ratios", ratios)

    def compare_with_interval(self) -> tuple[PredictionInterval, str]:
        """Return the interval of predicted step times, and how many strategies lie inside, such as "2 of 2"; no
        interval, and "", where the machine was too busy."""
        interval = prediction_interval(self.coefficients, self.inputs.layout)
        spread = max(one.spread for one in self.runs)
        if interval.low is not None and not self.load.is_quiet(spread):
            load = f"no core for {self.load.waited_share:.0%} of the time, rounds differ by {spread:.0%}"
            busy = f"machine busy while steps were measured: {load}"
            interval = PredictionInterval(low=None, high=None, basis=busy)
        return interval, interval.count_inside(one.measured_s / one.predicted_s for one in self.runs)

    @property
    def winner(self) -> str:
        """Return the fastest strategy, where the repeats tell it apart from all others; else ""."""
        fastest = min(self.runs, key=lambda one: one.measured_s)
        return fastest.strategy if all(ratio.is_clear for ratio in self.ratios) else ""

    @property
    def outcome(self) -> str:
        """Describe in one sentence without its full stop the first comparison that the repeats do not decide, or the
        first one."""
        text = f"{self.runs[0].strategy} takes {self.runs[0].measured_s:.3g} s a step"
        if self.ratios:
            text = min(self.ratios, key=lambda one: one.is_clear).describe()
        waited = f"; other programs held cores it needed for {self.load.waited_share:.0%} of the time"
        return text + (waited if self.load.waited_share > QUIET_WAITED_SHARE else "")


def pack_errors(times: tuple[PackTimes, ...], timeline: Timeline, rounds_s: NDArray[np.float64]) -> PackErrors:
    """Compare a plan's pack seconds by replica, with what overlapped transfers take, with those of the tasks of a
    measured timeline, float64[rounds, tasks], above 0, of which the median over the rounds counts."""
    columns = zip(*(getattr(timeline, name).tolist() for name in ("dp_rank", "kind", "pack", "stage")), strict=True)
    assert KINDS == "FBIW"
    seconds = [(one.forward_s, one.backward_s, one.input_s, one.weight_s) for one in times]
    predicted_s = np.array([seconds[dp_rank][kind][pack][stage] for dp_rank, kind, pack, stage in columns])
    measured_s = np.median(rounds_s, axis=0)
    errors = predicted_s / measured_s - 1
    size = np.abs(errors)
    return PackErrors(
        median=float(np.median(errors)),
        median_abs=float(np.median(size)),
        p90_abs=float(np.quantile(size, 0.9)),
        total=float(predicted_s.sum() / measured_s.sum() - 1),
        measured_s=float(np.median(measured_s)),
        predicted_s=float(np.median(predicted_s)),
        repeat_p90=float(np.quantile(np.abs(rounds_s / measured_s - 1), 0.9)),
    )


def loss_difference(runs: tuple[StrategyRuns, ...]) -> float:
    """Return the most that the loss of one batch differs between strategies, relative; 0 for one strategy."""
    worst = 0.0
    for same in zip(*(one.batches for one in runs), strict=True):
        losses = [run.loss for run in same]
        worst = max(worst, (max(losses) - min(losses)) / max(abs(max(losses, key=abs)), 1e-300))
    return worst
