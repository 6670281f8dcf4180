"""`parse_tokens`: token counts as people write them, `131072`, `128k` or `1M`."""

import re
from fractions import Fraction

from evenload.errors import ConfigError

_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}
HELP = "128k = 131072: 1k is 1024, 1M is 1024k."
"""For `--help`."""


def parse_tokens(option: str, text: str) -> int:
    """A count; `option` is named by errors."""
    match = re.fullmatch(r"(-?\d[\d_,]*(?:\.\d+)?)\s*([kKmMgG]?)", text.strip())
    if not match or (match[2] == "" and "." in match[1]):
        raise ConfigError(f"{option} is '{text}'; give a number of tokens, such as 131072 or 128k (1k = 1024)")
    count = Fraction(match[1].replace("_", "").replace(",", "")) * _UNITS[match[2].lower()]
    if count.denominator != 1:
        raise ConfigError(f"{option} is '{text}', which is {float(count)} tokens (1k = 1024); give a whole number")
    return int(count)
