"""Within which factors of a predicted step time the measured one lies in nine of ten cases.

What the public ledger of errors (docs/accuracy.md) supports: `prediction_errors.json` beside this file is made from its
rows (`tools/make_accuracy.py`, by `bench.error_intervals`) and holds an interval for measured costs of each kind of
layout, and one for all of them together, of CPUs and of GPUs apart.

Where it holds nothing, the interval is a prior that says so: the largest error that comparable simulators published
about themselves or each other, taken both ways.

    data sheet    21.8 %    dPRO at its worst (Lumos, MLSys'25; its mean was 14 %)
    measured      13.5 %    SimuMax v1.2 at its worst (43 signed rows; mean 5.6 %)
"""

import re
from functools import cache
from pathlib import Path
from typing import Literal

import msgspec

from evenload.cost.coefficients import CostCoefficients
from evenload.types.base import Frozen
from evenload.types.layout import ParallelLayout

DATA_SHEET_ERROR, MEASURED_ERROR = 0.218, 0.135
"""Largest published |predicted / measured - 1| of comparable simulators."""
Processor = Literal["cpu", "gpu"]
ANY_LAYOUT = "any layout"
"""The kind of layout that stands for all."""
_FILE = Path(__file__).with_name("prediction_errors.json")
# How a CPU is called in measured costs (`cli.worker_setup`): a GPU's name says nothing of threads.
_CPU = re.compile(r", \d+ threads? a process$")


class KindInterval(Frozen):
    """The interval of one kind of case, from rows of the ledger.

    Args:
        processor: that rows were measured on.
        layout: as `layout_kind` says it, or `ANY_LAYOUT`.
        low, high: nine of ten measured step times lie between these factors of the predicted one.
        rows, cases: that it was made from.
    """

    processor: Processor
    layout: str
    low: float
    high: float
    rows: int
    cases: int


class PredictionInterval(Frozen):
    """Factors of a predicted step time, and in words what they rest on."""

    low: float
    high: float
    basis: str

    def of(self, step_time_s: float) -> tuple[float, float]:
        """Seconds between which nine of ten steps like it are measured."""
        return step_time_s * self.low, step_time_s * self.high

    def describe(self) -> str:
        """In words, with what it rests on."""
        return f"90 % interval of step times: {self.low:.2f} to {self.high:.2f} times the predicted ({self.basis})"


def prediction_interval(coefficients: CostCoefficients, layout: ParallelLayout) -> PredictionInterval:
    """Of step times predicted with these costs in this layout."""
    if coefficients.source == "analytic":
        return _published(DATA_SHEET_ERROR, "costs of a data sheet")
    processor = processor_of(coefficients.device)
    known = {one.layout: one for one in ledger_intervals() if one.processor == processor}
    found = known.get(layout_kind(layout)) or known.get(ANY_LAYOUT)
    if found is None:
        return _published(MEASURED_ERROR, f"measured costs of a {processor.upper()}, too few rows in docs/accuracy.md")
    return PredictionInterval(
        low=found.low,
        high=found.high,
        basis=f"measured costs of a {processor.upper()}, {found.layout}: {found.rows} rows of {found.cases} cases in "
        "docs/accuracy.md",
    )


def processor_of(device: str) -> Processor:
    """Whether measured costs, by the name of their device, are of a CPU."""
    return "gpu" if _CPU.search(device) is None else "cpu"


def layout_kind(layout: ParallelLayout) -> str:
    """The parallel dimensions that a layout has, such as "dp pp"; "one device" where it has none."""
    return " ".join(axis for axis in ("dp", "cp", "pp", "tp") if getattr(layout, axis) > 1) or "one device"


@cache
def ledger_intervals() -> tuple[KindInterval, ...]:
    """Those that the installed package carries."""
    return msgspec.json.decode(_FILE.read_bytes(), type=tuple[KindInterval, ...])


def encode_intervals(intervals: tuple[KindInterval, ...]) -> bytes:
    """The file's content, a line an interval."""
    lines = ",\n".join(f"  {msgspec.json.encode(one).decode()}" for one in intervals)
    return f"[\n{lines}\n]\n".encode() if intervals else b"[]\n"


def _published(error: float, costs: str) -> PredictionInterval:
    return PredictionInterval(
        low=1 / (1 + error),
        high=1 / (1 - error),
        basis=f"{costs}: from published errors of comparable simulators, not from our ledger",
    )
