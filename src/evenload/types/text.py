"""Format numbers and texts for messages, tables and pictures. Bytes are binary, as device memory is sold; counts are
decimal (K, M); `None` and NaN are a dash, so that "not measured" never looks like zero; and lengths are named in the
unit in which they are counted."""

import math
import re
from typing import Literal


def counted(number: int, noun: str) -> str:
    """Return a number, with commas from 1,000 on, and a noun, given in the singular, whose last word is in the plural
    where the number is not 1."""
    if number == 1:
        return f"1 {noun}"
    if noun.endswith(("s", "sh", "ch", "x")):
        return f"{number:,} {noun}es"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return f"{number:,} {noun[:-1]}ies"
    return f"{number:,} {noun}s"


MISSING = "-"
"""Stands for a value that is not known."""
_COUNT_UNITS = ("", "K", "M", "G", "T", "P")
SECOND_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def format_bytes(num_bytes: float | None) -> str:
    """Format bytes in binary units: `1610612736` is "1.50 GiB"; below one KiB exact."""
    if num_bytes is None or math.isnan(num_bytes):
        return MISSING
    return scaled(num_bytes, 1024.0, _BYTE_UNITS, separator=" ")


def scaled(value: float, base: float, units: tuple[str, ...], separator: str) -> str:
    """Format a value in the largest of `units` (each `base` times the one before) of which it is at least one."""
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
    """Format three significant digits without an exponent; more when the whole part is longer."""
    magnitude = abs(round_to_three(value))
    decimals = 2 if magnitude < 10 else 1 if magnitude < 100 else 0
    return f"{value:.{decimals}f}"


def round_to_three(value: float) -> float:
    """Return the nearest number of three significant digits."""
    return float(f"{value:.3g}")


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


LengthUnit = Literal["tokens", "bytes"]
"""Without a tokenizer documents are counted in bytes, and nothing may call those tokens."""

# Whole words: names of settings, such as max_pack_tokens and --tokens, stay what they are.
_TOKEN_WORD = re.compile(r"(?<![\w-])(t|T)oken(s?)\b")


def in_unit(text: str, unit: LengthUnit) -> str:
    """Return a text about tokens in the unit that was counted."""
    if unit == "tokens":
        return text
    return _TOKEN_WORD.sub(lambda match: f"{'b' if match[1] == 't' else 'B'}yte{match[2]}", text)
