"""Values of options as people write them: `128k` to a number of tokens, `dp=8,pp=4` to a `ParallelLayout`."""

import re
from fractions import Fraction

from evenload.errors import ConfigError
from evenload.types.layout import ParallelLayout, even_layout
from evenload.types.nearest_name import did_you_mean

_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}
COUNTS = "128k = 131072: 1k is 1024, 1M is 1024k."
"""For `--help`."""
_AXES = ("dp", "cp", "pp", "tp", "virtual")


def parse_tokens(option: str, text: str) -> int:
    """A count; `option` is named by errors."""
    match = re.fullmatch(r"(-?\d[\d_,]*(?:\.\d+)?)\s*([kKmMgG]?)", text.strip())
    if not match or (match[2] == "" and "." in match[1]):
        raise ConfigError(f"{option} is '{text}'; give a number of tokens, such as 131072 or 128k (1k = 1024)")
    count = Fraction(match[1].replace("_", "").replace(",", "")) * _UNITS[match[2].lower()]
    if count.denominator != 1:
        raise ConfigError(f"{option} is '{text}', which is {float(count)} tokens (1k = 1024); give a whole number")
    return int(count)


def parse_layout(text: str, num_layers: int, num_devices: int) -> ParallelLayout:
    """Read sizes of parallel dimensions; those not named are 1, dp is what the others leave of the devices."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, separator, value = (piece.strip() for piece in part.partition("="))
        if not separator or axis not in _AXES or not value.isdecimal() or int(value) < 1:
            hint = "" if axis in _AXES else f"; {did_you_mean(axis, _AXES)}".rstrip("; ")
            raise ConfigError(
                f"layout '{text}': '{part.strip()}' is not one of dp cp pp tp virtual with a size, as dp=8,pp=4{hint}"
            )
        if axis in sizes:
            raise ConfigError(f"layout '{text}': {axis} is given twice")
        sizes[axis] = int(value)
    if "dp" not in sizes:
        rest = sizes.get("cp", 1) * sizes.get("pp", 1) * sizes.get("tp", 1)
        if num_devices % rest:
            raise ConfigError(f"layout '{text}' takes {rest} devices a replica, which does not divide {num_devices}")
        sizes["dp"] = num_devices // rest
    return even_layout(num_layers, **sizes)
