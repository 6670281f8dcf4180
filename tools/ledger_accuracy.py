"""What a ledger says as a whole: predictions made again, the limits that they must keep, order and intervals.

A prediction is made again from a row's recorded inputs by the running version, without measuring anything. It counts
where the plan is still the one that was measured (same digest, or the same seconds); a row whose plan is made no more
says nothing about this version until its case is measured again. Limits are for rows that were measured on a quiet
machine with a core for every thread: beyond that, ranks take cores from each other, and the simulator's devices do not.

Intervals of measured over predicted step times hold for cases which were not measured yet. They are CV+ (Barber,
Candès, Ramdas and Tibshirani, "Predictive inference with the jackknife+", Annals of Statistics 49, 2021, section 3)
with a fold a case: rows of one case share a model, a cost file and a machine's mood, so a row is judged by the other
cases only.

    m(-c)      the median of ln(measured / predicted) over all rows but those of case c
    R(i)       |ln ratio of row i - m(-c(i))|
    interval   from the floor(0.1 (n + 1))-th smallest of m - R to the ceil(0.9 (n + 1))-th smallest of m + R

The ranks with n + 1 are the correction for few rows; with fewer than nine there is no interval. The theorem promises
80 % whatever the distribution and rows of equal cases come out at about 90 %; how many left-out cases really lie inside
is tested on the ledger.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import ceil, floor, isclose
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np

from evenload.errors import EvenloadError
from evenload.explore.prediction_interval import ANY_LAYOUT, KindInterval, device_model
from ledger import LedgerRow, plan_again, read_inputs

MEDIAN_LIMIT, RANKING_LIMIT, APART = 0.08, 0.95, 0.05
"""Most median of absolute errors of step times, least share of pairs in the right order, and how much measured step
times must differ to be a pair."""
DRIFT_LIMIT = 0.01
"""By how much an error may differ from the recorded one."""
ROUNDED = 1e-5
"""To which a ledger's seconds are written down."""
KIND_CASES = 5
"""A kind of layout with fewer cases shares the interval of all."""


MIN_CASES = 3
"""Fewer say nothing about another case."""


class Again(NamedTuple):
    """A row, and the step time that the running version predicts for the plan that was measured; None where it makes
    another plan, or none."""

    row: LedgerRow
    predicted_s: float | None

    @property
    def error(self) -> float:
        """Signed, of the running version; the recorded one where that makes another plan."""
        return self.row.step_time_error if self.predicted_s is None else self.predicted_s / self.row.step_time_s - 1


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
    result = []
    for row in rows:
        inputs, coefficients = read_inputs(path, row.inputs)
        try:
            plan = plan_again(inputs, coefficients, row.strategy, row.batch)
        except EvenloadError:
            result.append(Again(row, None))
            continue
        predicted_s = plan.predicted.step_time_s
        # A digest has every last bit of the predicted seconds, which another processor's libraries may round otherwise.
        is_same = plan.digest == row.plan_digest or isclose(predicted_s, row.predicted_step_time_s, rel_tol=ROUNDED)
        result.append(Again(row, predicted_s if is_same else None))
    return tuple(result)


def held_to_limits(row: LedgerRow) -> bool:
    """Nothing took cores from its ranks, neither a neighbour nor each other."""
    return row.is_quiet and row.demand <= 1


def drifted(result: Iterable[Again]) -> list[str]:
    """A sentence for every row whose error is not what was recorded."""
    output = []
    for again in result:
        if again.predicted_s is None:
            continue
        row, error = again.row, again.error
        if abs(error - row.step_time_error) > DRIFT_LIMIT:
            output.append(
                f"{row.case}, {row.layout}, {row.strategy}, batch {row.batch}: predicted {again.predicted_s:.4f} s, "
                f"measured {row.step_time_s:.4f} s on {row.date}: error {error:+.1%}, recorded "
                f"{row.step_time_error:+.1%}; measure it again: python benchmarks/measured.py --case {row.case}"
            )
    return output


def beyond_limits(result: Sequence[Again]) -> list[str]:
    """A sentence for every limit that does not hold."""
    held = [again for again in result if held_to_limits(again.row)]
    output = []
    if held and (middle := median(abs(again.error) for again in held)) > MEDIAN_LIMIT:
        output.append(f"median error of step times {middle:.1%} over {len(held)} rows, limit {MEDIAN_LIMIT:.0%}")
    ranking = ranked(held)
    if ranking.share < RANKING_LIMIT:
        output.append(
            f"{ranking.right} of {ranking.pairs} pairs of strategies that differ by more than {APART:.0%} predicted "
            f"in the right order, limit {RANKING_LIMIT:.0%}"
        )
    return output


def ranked(result: Iterable[Again]) -> Ranking:
    """Strategies of one case and layout against each other, each by the sum of its batches."""
    right = pairs = 0
    for runs in _sums(result).values():
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
    result: dict[Kind, CaseRatios] = {}
    for row in rows:
        if held_to_limits(row) and row.costs != "analytic":
            of_kind = result.setdefault((device_model(row.device), kind_of(row)), {})
            ratio = row.step_time_s / row.predicted_step_time_s
            of_kind.setdefault(f"{row.case}, {row.layout}", []).append(ratio)
    return result


def intervals_of(rows: Iterable[LedgerRow]) -> tuple[KindInterval, ...]:
    """What `evenload.explore.prediction_interval` is to know: of kinds of layouts with enough cases, and of all."""
    result = []
    for (device, layout), ratios in _offered(ledger_ratios(rows)).items():
        interval = case_interval(ratios)
        if interval is not None:
            count = sum(map(len, ratios.values()))
            low, high = (round(factor, 4) for factor in interval)
            result.append(KindInterval(device=device, layout=layout, low=low, high=high, rows=count, cases=len(ratios)))
    return tuple(result)


def coverage(rows: Iterable[LedgerRow]) -> tuple[int, int]:
    """(rows inside, rows) where every case in turn is left out of the interval that it is held against."""
    by_kind = ledger_ratios(rows)
    offered = _offered(by_kind)
    result = [
        left_out_coverage(ratios, offered.get(kind, offered[kind[0], ANY_LAYOUT])) for kind, ratios in by_kind.items()
    ]
    return sum(inside for inside, _ in result), sum(total for _, total in result)


def case_interval(ratios: Mapping[str, Sequence[float]], miss: float = 0.1) -> tuple[float, float] | None:
    """Factors between which the ratio of a row of another case lies with probability 1 - `miss`.

    Args:
        ratios: measured / predicted of the rows of every case, above 0.

    Returns:
        None where there are too few cases or rows.
    """
    logs = {case: np.log(np.asarray(values, np.float64)) for case, values in ratios.items() if len(values)}
    count = sum(map(len, logs.values()))
    low_rank, high_rank = floor(miss * (count + 1)), ceil((1 - miss) * (count + 1))
    if len(logs) < MIN_CASES or low_rank < 1 or high_rank > count:
        return None
    low, high = [], []
    for case, values in logs.items():
        middle = np.median(np.concatenate([other for name, other in logs.items() if name != case]))
        sizes = np.abs(values - middle)
        low.append(middle - sizes)
        high.append(middle + sizes)
    return (
        float(np.exp(np.sort(np.concatenate(low))[low_rank - 1])),
        float(np.exp(np.sort(np.concatenate(high))[high_rank - 1])),
    )


def left_out_coverage(
    ratios: Mapping[str, Sequence[float]], among: Mapping[str, Sequence[float]] | None = None
) -> tuple[int, int]:
    """(rows inside, rows): every case against the interval that the others alone give, those of `among` where it is
    given; (0, 0) where they give none."""
    inside = total = 0
    for case, values in ratios.items():
        result = case_interval({name: others for name, others in (among or ratios).items() if name != case})
        if result is not None:
            total += len(values)
            inside += sum(result[0] <= value <= result[1] for value in values)
    return inside, total


def kind_of(row: LedgerRow) -> str:
    """As `layout_kind` says it."""
    axes = [part.partition("=")[0] for part in row.layout.split()]
    return " ".join(axis for axis in ("dp", "cp", "pp", "tp") if axis in axes) or "one device"


def _offered(by_kind: dict[Kind, CaseRatios]) -> dict[Kind, CaseRatios]:
    """Ratios of every interval that is given out."""
    result = {kind: ratios for kind, ratios in by_kind.items() if len(ratios) >= KIND_CASES}
    for (device, _), ratios in by_kind.items():
        result.setdefault((device, ANY_LAYOUT), {}).update(ratios)
    return result


def _sums(result: Iterable[Again]) -> dict[tuple[str, str], dict[str, tuple[float, float]]]:
    """Measured and predicted seconds of all batches, by case and layout and strategy."""
    sums: dict[tuple[str, str], dict[str, tuple[float, float]]] = {}
    for again in result:
        row = again.row
        runs = sums.setdefault((row.case, row.layout), {})
        measured_s, predicted_s = runs.get(row.strategy, (0.0, 0.0))
        runs[row.strategy] = (measured_s + row.step_time_s, predicted_s + row.step_time_s * (1 + again.error))
    return sums
