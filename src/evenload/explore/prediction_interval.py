"""Predict within which factors of a predicted step time the measured one lies in nine of ten cases.

`tools/make_accuracy.py` makes `prediction_errors.json` from the public ledger of errors (docs/accuracy.md): an interval
for each kind of layout and one for all, by model of processor. For other processors the interval is the largest error
that comparable simulators published: 21.8 % with data sheets (dPRO in Lumos, MLSys'25), 13.5 % measured (SimuMax v1.2).
Noise while costs were measured widens it; with too much noise there is none, nor where measuring was cut short.
"""

import math
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Literal

import msgspec

from evenload.cost.coefficients import CostCoefficients
from evenload.types.base import Frozen
from evenload.types.layout import ParallelLayout

DATA_SHEET_ERROR, MEASURED_ERROR = 0.218, 0.135
"""Largest published |predicted / measured - 1| of comparable simulators."""
ANY_LAYOUT = "any layout"  # the kind of layout that stands for all
_FILE = Path(__file__).with_name("prediction_errors.json")
# The end of a CPU's name in measured costs (`cli.worker_setup`); GPUs have no threads.
_CPU = re.compile(r", \d+ threads? a process$")


class KindInterval(Frozen):
    """The interval of one kind of case, from rows of the ledger.

    Args:
        device: model of the processor that rows were measured on (`device_model`).
        layout: of `layout_kind`, or `ANY_LAYOUT`.
        low, high: nine of ten measured step times lie between these factors of the predicted one.
        rows, cases: that it was made from.
    """

    device: str
    layout: str
    low: float
    high: float
    rows: int
    cases: int


class PredictionInterval(Frozen):
    """Factors of a predicted step time, and their basis; None where a machine was too busy or measuring cut short."""

    low: float | None
    high: float | None
    basis: str

    def of(self, step_time_s: float) -> tuple[float, float] | None:
        """Return the seconds between which nine of ten steps like it are measured; None where that is not known."""
        return None if self.low is None or self.high is None else (step_time_s * self.low, step_time_s * self.high)

    def count_inside(self, ratios: Iterable[float]) -> str:
        """Count how many of measured / predicted lie inside, such as "3 of 4"; "" where there is no interval."""
        result = self.of(1.0)
        inside = [result[0] <= ratio <= result[1] for ratio in ratios] if result is not None else []
        return f"{sum(inside):,} of {len(inside):,}" if inside else ""

    def describe(self) -> str:
        if self.low is None:
            return f"no 90 % interval of step times: {self.basis}"
        return f"90 % interval of step times: {self.low:.2f} to {self.high:.2f} times the predicted ({self.basis})"


def prediction_interval(coefficients: CostCoefficients, layout: ParallelLayout) -> PredictionInterval:
    """Return the interval of step times predicted with these costs in this layout.

    In logarithms, half its width and two errors of the timings add by their squares: ln(1 + spread), because the mean
    of ten to thirty normal repeats is 1.5 to 2 standard deviations above the fastest, and -ln(1 - waited_share).
    """
    if coefficients.source == "analytic":
        return _published(DATA_SHEET_ERROR, "costs of a data sheet")
    device, noise = device_model(coefficients.device), coefficients.noise
    known = {one.layout: one for one in ledger_intervals() if one.device == device}
    row = known.get(layout_kind(layout)) or known.get(ANY_LAYOUT)
    if row is None:
        ledger = _published(MEASURED_ERROR, f"measured costs of {device}, too few rows of it in docs/accuracy.md")
    else:
        rows = f"{row.layout}: {row.rows} rows of {row.cases} cases in docs/accuracy.md"
        ledger = PredictionInterval(low=row.low, high=row.high, basis=f"measured costs of {device}, {rows}")
    low, high = ledger.of(1.0) or (0.0, 0.0)
    if noise is None:
        old = "if the machine was quiet while they were measured, which a cost file of this age does not say"
        return PredictionInterval(low=low, high=high, basis=f"{ledger.basis}; {old}")
    if coefficients.measured_on is not None and coefficients.measured_on.is_cut_short:
        few = "measuring costs was cut short; train.recalibrate=true and a larger train.calibration_max_s measure more"
        return PredictionInterval(low=None, high=None, basis=few)
    if noise.is_noisy:
        busy = f"the machine was busy while its costs were measured: {noise.describe()}"
        return PredictionInterval(low=None, high=None, basis=busy)
    half = math.hypot(math.log(high / low) / 2, math.log1p(noise.spread), math.log1p(-noise.waited_share))
    middle, basis = math.sqrt(low * high), f"{ledger.basis}, there {low:.2f} to {high:.2f}; here {noise.describe()}"
    return PredictionInterval(low=middle / math.exp(half), high=middle * math.exp(half), basis=basis)


def processor_of(device: str) -> Literal["cpu", "gpu"]:
    return "gpu" if _CPU.search(device) is None else "cpu"


def device_model(device: str) -> str:
    """Return the name of a device of measured costs without its threads."""
    return _CPU.sub("", device)


def layout_kind(layout: ParallelLayout) -> str:
    """Return the parallel dimensions of a layout, such as "dp pp"; "one device" where it has none."""
    return " ".join(axis for axis in ("dp", "cp", "pp", "tp") if getattr(layout, axis) > 1) or "one device"


@cache
def ledger_intervals() -> tuple[KindInterval, ...]:
    return msgspec.json.decode(_FILE.read_bytes(), type=tuple[KindInterval, ...])


def _published(error: float, costs: str) -> PredictionInterval:
    return PredictionInterval(
        low=1 / (1 + error),
        high=1 / (1 - error),
        basis=f"{costs}: from published errors of comparable simulators, not from our ledger",
    )
