"""docs/accuracy.md, its picture and the package's intervals are what tools/make_accuracy.py makes of the rows."""

import runpy
import xml.etree.ElementTree as ElementTree
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


def test_a_dot_a_row_inside_the_picture(script):
    drawn = ElementTree.fromstring(script["picture"](list(rows())))
    dots = drawn.findall(".//{http://www.w3.org/2000/svg}circle")
    assert len(dots) == 18
    assert all(script["LEFT"] < float(dot.get("cx")) < script["WIDTH"] for dot in dots)
    assert max(float(dot.get("cy")) for dot in dots) < float(drawn.get("height"))


def test_the_page_of_rows_says_kinds_worst_cases_and_what_is_not_held(script, monkeypatch):
    busy = ledger_row(case="busy", layout="pp=2", strategy="auto", waited_share=0.4, step_time_s=2.0)
    crowded = ledger_row(case="crowded", layout="pp=2", strategy="auto", demand=2, step_time_s=2.0)
    page = script["page"]
    monkeypatch.setitem(page.__globals__, "all_rows", lambda: [*rows(), busy, crowded])
    text = page()
    assert "| calibrated | dp pp | whole documents | 6 | +2.5% |" in text
    assert "| calibrated | dp pp | by rank | 6 | -2.0% |" in text
    worst = text.partition("## The worst, and why")[2]
    first = "| case 0 | dp=2 pp=2 | slimpack, 0 | 1 s | +50.0% | +12.5% | between packs: waiting, transfers, "
    assert worst.lstrip("\n").splitlines()[2].startswith(first)
    assert "| busy | pp=2 | auto, 0 | 2 s | +0.0% | +0.0% | busy machine: 40% of the time without a core" in text
    assert "2 computing threads a core: ranks wait for each other's cores" in text
    assert "| measured, on x | dp pp | " in text
