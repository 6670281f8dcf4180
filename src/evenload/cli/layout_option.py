"""`--layout dp=8,pp=4`: text to `ParallelLayout`."""

from evenload.errors import ConfigError
from evenload.types.layout import ParallelLayout, even_layout
from evenload.types.nearest_name import did_you_mean

_AXES = ("dp", "cp", "pp", "tp", "virtual")


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
