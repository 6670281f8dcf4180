"""Values of options as people write them: `128k` to a number of tokens, `dp=8,pp=4` to a `ParallelLayout`."""

import re
from fractions import Fraction

from evenload.errors import ConfigError
from evenload.types.counted import counted
from evenload.types.layout import ParallelLayout
from evenload.types.layout_text import read_layout_text

_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}
COUNTS = "128k = 131072: 1k is 1024, 1M is 1024k."
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


def parse_layout(text: str, num_layers: int, num_devices: int) -> ParallelLayout:
    """Read sizes of parallel dimensions; those not named are 1, dp is what the others leave of the devices."""
    written = read_layout_text(text)
    if "dp" in written.sizes:
        return written.layout(num_layers)
    rest = written.ranks_per_replica
    if written.devices is not None:
        if rest != num_devices:
            raise ConfigError(
                f"layout '{text}' takes {counted(rest, 'device')}, there are {num_devices}; it has no replicas"
            )
        return written.layout(num_layers)
    if num_devices % rest:
        raise ConfigError(
            f"layout '{text}' takes {counted(rest, 'device')} a replica, which does not divide {num_devices}"
        )
    return written.layout(num_layers, dp=num_devices // rest)
