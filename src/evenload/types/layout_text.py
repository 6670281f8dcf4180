"""A layout as people write it: `dp=8,pp=4`, or with layers of stages that are not even, `pp=3,layers=3+3+2`,
or with different numbers of devices, `pp=3,devices=1+2+1`."""

from evenload.errors import ConfigError
from evenload.types.base import Frozen
from evenload.types.counted import counted
from evenload.types.layout import ParallelLayout, even_layout, split_layout
from evenload.types.nearest_name import did_you_mean

_AXES = ("dp", "cp", "pp", "tp", "virtual")
_OF_STAGES = ("layers", "devices")


class LayoutText(Frozen):
    """What was written.

    Args:
        text: for messages.
        sizes: of the axes that are named.
        layers: of every virtual stage; None = split evenly.
        devices: of every stage; None = dp x cp x tp each.
    """

    text: str
    sizes: dict[str, int]
    layers: tuple[int, ...] | None = None
    devices: tuple[int, ...] | None = None

    def size(self, axis: str) -> int:
        """1 where the axis is not named."""
        return self.sizes.get(axis, 1)

    @property
    def ranks_per_replica(self) -> int:
        """Ranks that one replica takes."""
        pipeline_ranks = self.size("pp") if self.devices is None else sum(self.devices)
        return self.size("cp") * pipeline_ranks * self.size("tp")

    def layout(self, num_layers: int, **sizes: int) -> ParallelLayout:
        """With these sizes in place of those that were not written.

        Raises:
            ConfigError: more stages than layers, `layers` that are not those of the stages and the model, or `devices`
                that are not those of the stages, or not tested with the other sizes.
        """
        all_sizes = sizes | self.sizes
        if self.layers is None:
            return even_layout(num_layers, devices=self.devices, **all_sizes)
        virtual = all_sizes.pop("virtual", 1)
        stages = all_sizes.get("pp", 1) * virtual
        if len(self.layers) != stages or sum(self.layers) != num_layers:
            raise ConfigError(
                f"layout '{self.text}': layers={'+'.join(map(str, self.layers))} gives {sum(self.layers)} layers to "
                f"{counted(len(self.layers), 'stage')}, the layout has {counted(stages, 'stage')} and the model "
                f"{num_layers} layers"
            )
        return split_layout(self.layers, devices=self.devices, **all_sizes)


def read_layout_text(text: str) -> LayoutText:
    """Read sizes of axes, layers and devices of stages; `ConfigError` for anything else, or the same twice."""
    sizes: dict[str, int] = {}
    of_stages: dict[str, tuple[int, ...]] = {}
    for part in text.split(","):
        key, separator, value = (piece.strip() for piece in part.partition("="))
        if key in sizes or key in of_stages:
            raise ConfigError(f"layout '{text}': {key} is given twice")
        counts = value.split("+") if key in _OF_STAGES else [value]
        if not separator or key not in (*_AXES, *_OF_STAGES) or not all(_is_size(one) for one in counts):
            hint = "" if key in (*_AXES, *_OF_STAGES) else f"; {did_you_mean(key, _AXES)}".rstrip("; ")
            raise ConfigError(
                f"layout '{text}': '{part.strip()}' is not one of dp cp pp tp virtual with a size, as dp=8,pp=4, nor "
                f"layers or devices of all stages, as pp=3,layers=3+3+2 or pp=3,devices=1+2+1{hint}"
            )
        if key in _OF_STAGES:
            of_stages[key] = tuple(map(int, counts))
        else:
            sizes[key] = int(value)
    return LayoutText(text=text, sizes=sizes, layers=of_stages.get("layers"), devices=of_stages.get("devices"))


def _is_size(text: str) -> bool:
    return text.isdecimal() and int(text) > 0
