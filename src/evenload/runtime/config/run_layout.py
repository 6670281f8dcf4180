"""`layout_of`: the layout that a run's settings ask for. Needs no torch: `evenload plan` asks, too."""

from evenload.errors import ConfigError
from evenload.runtime.config.train_config import TrainConfig
from evenload.types.layout import ParallelLayout, even_layout, split_layout

BYTES_PER_ELEMENT = {"float64": 8, "float32": 4, "bfloat16": 2}
"""Of `model.dtype`."""


def layout_of(config: TrainConfig, num_layers: int) -> ParallelLayout:
    """The configured layout; layers are split evenly where `parallel.stage_layers` is not set.

    Raises:
        ConfigError: more stages than layers, or stages that do not hold all layers.
    """
    p = config.parallel
    if p.stage_layers is None:
        return even_layout(num_layers, dp=p.dp, cp=p.cp, pp=p.pp, tp=p.tp, virtual=p.virtual)
    if sum(p.stage_layers) != num_layers:
        raise ConfigError(
            f"parallel.stage_layers {list(p.stage_layers)} hold {sum(p.stage_layers)} layers, the model has "
            f"{num_layers}; give every layer to a stage, or leave stage_layers out for an even split"
        )
    return split_layout(p.stage_layers, dp=p.dp, cp=p.cp, pp=p.pp, tp=p.tp)
