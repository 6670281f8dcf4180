"""docs/accuracy.md, its picture and the package's intervals are what tools/make_accuracy.py makes of the rows."""

import runpy
from pathlib import Path

import pytest

from bench_samples import ledger_row

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(ROOT / "tools" / "make_accuracy.py"))


def test_the_committed_page_picture_and_intervals_are_the_made_ones(script):
    assert script["PAGE"].read_text(encoding="utf-8") == script["page"]()
    assert script["PICTURE"].read_text(encoding="utf-8") == script["picture"](script["held"]())
    assert script["INTERVALS"].read_bytes() == script["intervals"]()


def rows():
    for case in range(6):
        for strategy, error in (("best_fit", 0.01 * case), ("skrull", -0.02), ("slimpack", -0.4 if case else 0.5)):
            yield ledger_row(
                case=f"case {case}",
                layout="dp=2 pp=2",
                costs="calibrated",
                strategy=strategy,
                step_time_s=1.0,
                predicted_step_time_s=1.0 + error,
                step_time_error=error,
                pack_time_error_total=error / 4 if strategy == "slimpack" else error,
            )
