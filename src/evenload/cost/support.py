"""Which parallel layouts this version can cost and run; one place, so that every command says the same."""

from evenload.errors import ConfigError
from evenload.types.layout import ParallelLayout
from evenload.types.model import ModelSpec


def require_supported_layout(model: ModelSpec, layout: ParallelLayout) -> None:
    """Refuse what would be costed or run wrong.

    Raises:
        ConfigError: context or tensor parallelism (planned), or a layout for another number of layers.
    """
    for field in ("cp", "tp"):
        if getattr(layout, field) > 1:
            raise ConfigError(
                f"layout {layout.describe()}: {field}={getattr(layout, field)} is not available in this version, "
                f"planned; use dp and pp with {field}=1"
            )
    if layout.num_layers != model.num_layers:
        raise ConfigError(
            f"layout {layout.describe()} splits {layout.num_layers} layers, "
            f"model {model.name} has {model.num_layers}; make the layout with even_layout({model.num_layers}, ...)"
        )
