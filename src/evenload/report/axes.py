"""Axes of the page's pictures: where a value lies, and ticks that people read easily."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from evenload.report.units import format_count, format_power_of_two

_STEPS = (1, 2, 5, 10)
_SECOND_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))


@dataclass(frozen=True)
class Scale:
    """Values between two bounds as shares of an axis; `is_log` by their logarithms."""

    low: float
    high: float
    is_log: bool = False

    def share(self, value: float) -> float:
        low, high, at = self.low, self.high, value
        if self.is_log:
            low, high, at = math.log(low), math.log(high), math.log(value)
        return (at - low) / (high - low) if high > low else 0.5


@dataclass(frozen=True)
class Tick:
    """A place on an axis and its label; on a narrow page only every so many are shown."""

    at: float
    label: str
    is_minor: bool = False


def round_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten within the bounds, about `count`."""
    if not high > low:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in _STEPS if power * factor >= rough * 0.8)
    first = math.ceil(low / step - 1e-9)
    return [k * step for k in range(first, math.floor(high / step + 1e-9) + 1)]


def tick_labels(values: Sequence[float], kind: str) -> list[str]:
    """All labels of an axis in one unit: "s", "%", "×", "count" or "" for plain numbers."""
    most = max((abs(value) for value in values), default=0.0)
    step = abs(values[1] - values[0]) if len(values) > 1 else most
    if kind == "s":
        unit_s, name = next(((u, n) for u, n in _SECOND_UNITS if most >= u * 0.9999), _SECOND_UNITS[-1])
        return [f"{_plain(value / unit_s, step / unit_s)} {name}" for value in values]
    if kind == "%":
        return [f"{_plain(100 * value, 100 * step)} %" for value in values]
    if kind == "count":
        return [format_count(value).replace(".00", "") for value in values]
    return [f"{_plain(value, step)}{kind}" for value in values]


def step_ticks(first: int, last: int) -> list[Tick]:
    """Ticks of whole steps, every other one left out on a narrow page."""
    found = [round(value) for value in round_ticks(first, last, 10)]
    whole = list(dict.fromkeys(value for value in found if first <= value <= last)) or [first]
    return [Tick(value, f"{value:,}", is_minor=bool(i % 2)) for i, value in enumerate(whole)]


def length_ticks(shortest: int, longest: int) -> list[Tick]:
    """Powers of two around lengths."""
    powers = range(shortest.bit_length() - 1, longest.bit_length() + 1)
    every = max(1, math.ceil(len(powers) / 7))
    return [Tick(2**k, format_power_of_two(2**k), is_minor=bool(i % every)) for i, k in enumerate(powers)]


def class_ticks(labels: Sequence[str]) -> list[Tick]:
    """Labels of classes, one place each."""
    every = max(1, math.ceil(len(labels) / 8))
    return [Tick(i, label, is_minor=bool(i % every)) for i, label in enumerate(labels)]


def _plain(value: float, step: float) -> str:
    """As many decimals as tell two ticks apart."""
    decimals = max(0, -math.floor(math.log10(step) + 1e-9)) if step > 0 else 0
    return f"{value:,.{min(6, decimals)}f}" if value else "0"
