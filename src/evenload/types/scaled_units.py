"""Numbers in the unit that fits, for messages and reports alike: `format_bytes`, and `scaled` for other units.

Here and not with the reports, because planners and the runtime say in their messages how much memory is missing, and a
model of a few MiB is not helped by "needs 0.0 GiB".
"""

import math

MISSING = "-"
"""What stands for a value that is not known, so that it never looks like zero."""
_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def format_bytes(num_bytes: float | None) -> str:
    """Bytes in binary units: `1610612736` is "1.50 GiB"; below one KiB exact."""
    if num_bytes is None or math.isnan(num_bytes):
        return MISSING
    return scaled(num_bytes, 1024.0, _BYTE_UNITS, separator=" ")


def scaled(value: float, base: float, units: tuple[str, ...], separator: str) -> str:
    """A value in the largest of `units` (each `base` times the one before) of which it is at least one."""
    if not math.isfinite(value):
        return str(value)
    power = 0
    while round(abs(value / base**power)) >= base and power + 1 < len(units):
        power += 1
    if power == 0:
        number = f"{value:.0f}" if float(value).is_integer() else three_digits(value)
        return f"{number}{separator}{units[0]}" if units[0] else number
    return f"{three_digits(value / base**power)}{separator}{units[power]}"


def three_digits(value: float) -> str:
    """Three significant digits without an exponent; more when the whole part is longer."""
    magnitude = abs(round_to_three(value))
    decimals = 2 if magnitude < 10 else 1 if magnitude < 100 else 0
    return f"{value:.{decimals}f}"


def round_to_three(value: float) -> float:
    """The nearest number of three significant digits."""
    return float(f"{value:.3g}")
