"""Intervals for cases that were not measured, on drawn errors whose distribution is known."""

import math

import numpy as np
import pytest

from ledger_accuracy import case_interval, left_out_coverage


def drawn(rng: np.random.Generator, cases: int, rows: int, case_sd: float, row_sd: float) -> dict[str, list[float]]:
    """Ratios around e^0.02 whose cases are off as a whole, and rows of a case among themselves."""
    return {
        str(case): np.exp(0.02 + rng.normal(0, case_sd) + rng.normal(0, row_sd, rows)).tolist() for case in range(cases)
    }


@pytest.mark.parametrize(("case_sd", "row_sd"), [(0.0, 0.05), (0.03, 0.03), (0.05, 0.02)])
@pytest.mark.parametrize("cases", [6, 16])
def test_nine_of_ten_rows_of_new_cases_lie_inside(cases, case_sd, row_sd):
    rng, inside = np.random.default_rng(0), []
    for _ in range(150):
        low, high = case_interval(drawn(rng, cases, 12, case_sd, row_sd)) or (math.nan, math.nan)
        new = np.concatenate(list(drawn(rng, 20, 5, case_sd, row_sd).values()))
        inside.append(np.mean((low <= new) & (new <= high)))
    assert 0.85 <= np.mean(inside) <= 0.95


@pytest.mark.parametrize(("case_sd", "row_sd"), [(0.0, 0.05), (0.03, 0.03), (0.05, 0.02)])
def test_what_is_counted_by_leaving_cases_out_is_what_new_cases_see(case_sd, row_sd):
    rng = np.random.default_rng(1)
    counts = np.array([left_out_coverage(drawn(rng, 12, 12, case_sd, row_sd)) for _ in range(100)])
    assert (counts[:, 1] == 144).all()
    assert 0.85 <= counts[:, 0].sum() / counts[:, 1].sum() <= 0.95


def test_an_interval_by_hand():
    """Three cases of three rows, every other case's median 1: ranks 1 and 9 of 9 are the extremes, mirrored."""
    low, high = case_interval({"a": [0.9, 1.0, 1.1], "b": [1.0, 1.0, 1.0], "c": [1.0, 1.2, 1.0]}) or (0.0, 0.0)
    assert low == pytest.approx(1 / 1.2)
    assert high == pytest.approx(1.2)


def test_bias_moves_the_interval():
    low, high = case_interval({name: [1.3] * 4 for name in "abc"}) or (0.0, 0.0)
    assert (low, high) == (pytest.approx(1.3), pytest.approx(1.3))


@pytest.mark.parametrize(
    "ratios", [{}, {"a": [1.0] * 50, "b": [1.0] * 50}, {"a": [1.0] * 3, "b": [1.0] * 3, "c": [1.0] * 2}]
)
def test_too_few_rows_or_cases_give_none(ratios):
    assert case_interval(ratios) is None
    assert left_out_coverage(ratios) == (0, 0)
