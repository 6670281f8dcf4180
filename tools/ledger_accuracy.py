"""What a ledger says as a whole: predictions made again, the limits that they must keep, order and intervals.

A prediction is made again from a row's recorded inputs by the running version, without measuring anything. It counts
where the plan is still the one that was measured (same digest, or the same seconds); a row whose plan is made no more
says nothing about this version until its case is measured again.

Limits are for rows that were measured on a quiet machine with a core for every thread: beyond that, ranks take cores
from each other, and the simulator's devices do not. They are held against the model's errors: those at the speed that
the machine had while it was measured (`MachineLoad.drift`).
"""

from collections.abc import Iterable, Sequence
from math import isclose
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from evenload.bench.ledger import LedgerRow, read_inputs
from evenload.bench.recorded import plan_again
from evenload.errors import EvenloadError
from evenload.explore.prediction_interval import ANY_LAYOUT, KindInterval, device_model
from ledger_intervals import case_interval, left_out_coverage

STEP_LIMIT, BIAS_LIMIT, RANKING_LIMIT, APART = 0.10, 0.03, 0.95, 0.05
"""Most error of a step time, most of their mean, least share of pairs in the right order, and how much measured step
times must differ to be a pair."""
DRIFT_LIMIT = 0.01
"""By how much an error may differ from the recorded one."""
ROUNDED = 1e-5
"""To which a ledger's seconds are written down."""
KIND_CASES = 5
"""A kind of layout with fewer cases shares the interval of all."""


class Again(NamedTuple):
    """A row, and the step time that the running version predicts for the plan that was measured; None where it makes
    another plan, or none."""

    row: LedgerRow
    predicted_s: float | None

    @property
    def error(self) -> float:
        """Signed, of the running version; the recorded one where that makes another plan."""
        return self.row.step_time_error if self.predicted_s is None else self.predicted_s / self.row.step_time_s - 1

    @property
    def model_error(self) -> float:
        """What is left of it at the speed that the machine had while it was measured."""
        return (1 + self.error) * (1 + (self.row.machine_drift or 0.0)) - 1


class Ranking(NamedTuple):
    """Pairs of strategies on the same batches whose measured step times differ by more than `APART`."""

    right: int
    pairs: int

    @property
    def share(self) -> float:
        """Of pairs predicted in the right order; 1 without pairs."""
        return self.right / self.pairs if self.pairs else 1.0


def predicted_again(path: Path, rows: Iterable[LedgerRow]) -> tuple[Again, ...]:
    """Rows of a ledger with today's predictions.

    Raises:
        ConfigError: recorded inputs are missing or of another version.
    """
    found = []
    for row in rows:
        inputs, coefficients = read_inputs(path, row.inputs)
        try:
            plan = plan_again(inputs, coefficients, row.strategy, row.batch)
        except EvenloadError:
            found.append(Again(row, None))
            continue
        predicted_s = plan.predicted.step_time_s
        # A digest has every last bit of the predicted seconds, which another processor's libraries may round otherwise.
        is_same = plan.digest == row.plan_digest or isclose(predicted_s, row.predicted_step_time_s, rel_tol=ROUNDED)
        found.append(Again(row, predicted_s if is_same else None))
    return tuple(found)


def held_to_limits(row: LedgerRow) -> bool:
    """Nothing took cores from its ranks, neither a neighbour nor each other."""
    return row.is_quiet and row.demand <= 1


def drifted(found: Iterable[Again]) -> list[str]:
    """A sentence for every row whose error is not what was recorded: beyond the limit, or elsewhere."""
    said = []
    for again in found:
        if again.predicted_s is None:
            continue
        row, error = again.row, again.error
        leaves = held_to_limits(row) and abs(again.model_error) > STEP_LIMIT >= abs(row.model_error)
        if leaves or abs(error - row.step_time_error) > DRIFT_LIMIT:
            said.append(
                f"{row.case}, {row.layout}, {row.strategy}, batch {row.batch}: predicted {again.predicted_s:.4f} s, "
                f"measured {row.step_time_s:.4f} s on {row.date}: error {error:+.1%}, recorded "
                f"{row.step_time_error:+.1%}; measure it again: python benchmarks/measured.py --case {row.case}"
            )
    return said


def beyond_limits(found: Sequence[Again]) -> list[str]:
    """A sentence for every limit that does not hold."""
    held = [again for again in found if held_to_limits(again.row)]
    said = [
        f"{case}, {layout}, {strategy}: step time error {error:+.1%}, limit {STEP_LIMIT:.0%}"
        for (case, layout, strategy), error in _errors_by_strategy(held).items()
        if abs(error) > STEP_LIMIT
    ]
    if held and abs(bias := mean(again.model_error for again in held)) > BIAS_LIMIT:
        said.append(f"mean error of step times {bias:+.1%} over {len(held)} rows, limit {BIAS_LIMIT:.0%}")
    ranking = ranked(held)
    if ranking.share < RANKING_LIMIT:
        said.append(
            f"{ranking.right} of {ranking.pairs} pairs of strategies that differ by more than {APART:.0%} predicted "
            f"in the right order, limit {RANKING_LIMIT:.0%}"
        )
    return said


def ranked(found: Iterable[Again]) -> Ranking:
    """Strategies of one case and layout against each other, each by the sum of its batches."""
    right = pairs = 0
    for runs in _sums(found).values():
        times = list(runs.values())
        for index, one in enumerate(times):
            for other in times[index + 1 :]:
                faster, slower = sorted((one, other))
                if slower[0] > (1 + APART) * faster[0]:
                    pairs += 1
                    right += slower[1] > faster[1]
    return Ranking(right, pairs)


Kind = tuple[str, str]
"""What an interval speaks for: a model of processor, and a kind of layout."""
CaseRatios = dict[str, list[float]]
"""Measured / predicted of the rows of every case."""


def ledger_ratios(rows: Iterable[LedgerRow]) -> dict[Kind, CaseRatios]:
    """Of rows that limits hold for, with measured costs."""
    found: dict[Kind, CaseRatios] = {}
    for row in rows:
        if held_to_limits(row) and row.costs != "analytic":
            of_kind = found.setdefault((device_model(row.device), kind_of(row)), {})
            ratio = row.step_time_s / row.predicted_step_time_s
            of_kind.setdefault(f"{row.case}, {row.layout}", []).append(ratio)
    return found


def intervals_of(rows: Iterable[LedgerRow]) -> tuple[KindInterval, ...]:
    """What `evenload.explore.prediction_interval` is to know: of kinds of layouts with enough cases, and of all."""
    found = []
    for (device, layout), ratios in _offered(ledger_ratios(rows)).items():
        interval = case_interval(ratios)
        if interval is not None:
            count = sum(map(len, ratios.values()))
            low, high = (round(factor, 4) for factor in interval)
            found.append(KindInterval(device=device, layout=layout, low=low, high=high, rows=count, cases=len(ratios)))
    return tuple(found)


def coverage(rows: Iterable[LedgerRow]) -> tuple[int, int]:
    """(rows inside, rows) where every case in turn is left out of the interval that it is held against."""
    by_kind = ledger_ratios(rows)
    offered = _offered(by_kind)
    found = [
        left_out_coverage(ratios, offered.get(kind, offered[kind[0], ANY_LAYOUT])) for kind, ratios in by_kind.items()
    ]
    return sum(inside for inside, _ in found), sum(total for _, total in found)


def kind_of(row: LedgerRow) -> str:
    """As `layout_kind` says it."""
    axes = [part.partition("=")[0] for part in row.layout.split()]
    return " ".join(axis for axis in ("dp", "cp", "pp", "tp") if axis in axes) or "one device"


def _offered(by_kind: dict[Kind, CaseRatios]) -> dict[Kind, CaseRatios]:
    """Ratios of every interval that is given out."""
    found = {kind: ratios for kind, ratios in by_kind.items() if len(ratios) >= KIND_CASES}
    for (device, _), ratios in by_kind.items():
        found.setdefault((device, ANY_LAYOUT), {}).update(ratios)
    return found


def _sums(found: Iterable[Again]) -> dict[tuple[str, str], dict[str, tuple[float, float]]]:
    """Measured seconds of all batches, and those predicted at the machine's speed, by case and layout and strategy."""
    sums: dict[tuple[str, str], dict[str, tuple[float, float]]] = {}
    for again in found:
        row = again.row
        runs = sums.setdefault((row.case, row.layout), {})
        measured_s, predicted_s = runs.get(row.strategy, (0.0, 0.0))
        runs[row.strategy] = (measured_s + row.step_time_s, predicted_s + row.step_time_s * (1 + again.model_error))
    return sums


def _errors_by_strategy(found: Iterable[Again]) -> dict[tuple[str, str, str], float]:
    return {
        (*case, strategy): predicted_s / measured_s - 1
        for case, runs in _sums(found).items()
        for strategy, (measured_s, predicted_s) in runs.items()
    }
