"""Format numbers for messages and reports: counts with a noun, bytes and other scaled units, and texts in the unit in
which lengths are counted."""

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
"""Stands for a value that is not known, which must not look like zero."""
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


LengthUnit = Literal["tokens", "bytes"]
"""Without a tokenizer documents are counted in bytes, and nothing may call those tokens."""

# Whole words: names of settings, such as max_pack_tokens and --tokens, stay what they are.
_TOKEN_WORD = re.compile(r"(?<![\w-])(t|T)oken(s?)\b")


def in_unit(text: str, unit: LengthUnit) -> str:
    """Return a text about tokens in the unit that was counted."""
    if unit == "tokens":
        return text
    return _TOKEN_WORD.sub(lambda match: f"{'b' if match[1] == 't' else 'B'}yte{match[2]}", text)
