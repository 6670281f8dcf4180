"""Format numbers for tables, messages and pictures. Bytes are binary (`types.text`), as device memory is sold; counts
are decimal (K, M); `None` and NaN are a dash, so that "not measured" never looks like zero."""

import math

from evenload.types.text import MISSING, round_to_three, scaled, three_digits

_COUNT_UNITS = ("", "K", "M", "G", "T", "P")
SECOND_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))


def format_count(count: float | None) -> str:
    """Format a count in decimal units: `131072` is "131K"; below 1,000 exact."""
    return MISSING if count is None or math.isnan(count) else scaled(count, 1000.0, _COUNT_UNITS, separator="")


def format_power_of_two(count: int) -> str:
    """Format tokens of a context window: `131072` is "128K", `1048576` "1M"; other numbers with all digits."""
    for unit, name in ((2**30, "G"), (2**20, "M"), (2**10, "K")):
        if count >= unit and count % unit == 0:
            return f"{count // unit:,}{name}"
    return f"{count:,}"


def format_seconds(seconds: float | None) -> str:
    """Format seconds with three digits in s, ms, µs or ns: `0.0123` is "12.3 ms"; from 100 s on whole seconds."""
    if seconds is None or math.isnan(seconds):
        return MISSING
    if not math.isfinite(seconds):
        return str(seconds)
    if seconds == 0:
        return "0 s"
    for unit_s, name in SECOND_UNITS:
        # Rounded first, so that 0.9999 s is "1.00 s" and not "1000 ms".
        if abs(round_to_three(seconds)) >= unit_s:
            return f"{three_digits(seconds / unit_s)} {name}"
    return f"{seconds:.3g} s"


def format_interval(seconds: tuple[float, float]) -> str:
    """Format an interval in the unit of its end: `(0.82, 1.28)` is "0.82-1.28 s"."""
    low_s, high_s = seconds
    shown = format_seconds(high_s)
    number, space, unit = shown.rpartition(" ")
    factor = next((unit_s for unit_s, name in SECOND_UNITS if name == unit), None)
    if not space or factor is None or low_s == 0:
        return f"{format_seconds(low_s)} - {shown}"
    return f"{three_digits(low_s / factor)}-{number} {unit}"


def format_percent(fraction: float | None) -> str:
    """Format a share of one: `0.0734` is "7.3 %"."""
    return MISSING if fraction is None or math.isnan(fraction) else f"{100 * fraction:.1f} %"


def format_share(share: float) -> str:
    """Format as `format_percent`, but a dot for exactly nothing, and "<0.1 %" instead of "0.0 %"."""
    return "·" if share == 0 else "<0.1 %" if share < 0.0005 else format_percent(share)


def format_change(fraction: float | None) -> str:
    """Format a signed relative change: `-0.054` is "-5.4 %"."""
    return MISSING if fraction is None or math.isnan(fraction) else f"{100 * fraction:+.1f} %"


def format_ratio(ratio: float | None) -> str:
    """Format a ratio near one, such as max over mean: `1.0412` is "1.041"."""
    return MISSING if ratio is None or math.isnan(ratio) else f"{ratio:.3f}"


def format_plain(value: float | None, spec: str) -> str:
    """Format a number by a specification; NaN and infinity are shown, only `None` is missing."""
    return MISSING if value is None else format(float(value), spec)


def format_layout(layout: object) -> str:
    """Format a layout as "dp=8 pp=4 cp=1 tp=1", from a mapping with those keys, or a text."""
    if layout is None:
        return MISSING
    if isinstance(layout, dict):
        return " ".join(f"{key}={layout[key]}" for key in ("dp", "pp", "cp", "tp") if key in layout)
    return str(layout)
