"""Which parallel layouts a model allows; one place, so that every command says the same.

What the runtime can train is narrower and refused there (`runtime.comm.mesh`).
"""

from evenload.errors import ConfigError
from evenload.types.layout import ParallelLayout
from evenload.types.model import ModelSpec


def require_supported_layout(model: ModelSpec, layout: ParallelLayout) -> None:
    """Refuse what would be costed wrong.

    Raises:
        ConfigError: heads that do not divide over tensor ranks, context parallelism of a bidirectional model, or a
            layout for another number of layers.
    """
    kv_heads = model.num_kv_heads
    if model.num_heads % layout.tp or (kv_heads % layout.tp and layout.tp % kv_heads):
        raise ConfigError(
            f"layout {layout.describe()}: {model.num_heads} query and {kv_heads} key/value heads of {model.name} do "
            f"not divide over tp={layout.tp}; choose a tp that divides both (or a multiple of {kv_heads})"
        )
    if layout.cp > 1 and not model.causal:
        raise ConfigError(
            f"layout {layout.describe()}: model {model.name} is bidirectional and context parallelism shards causal "
            "documents only; use cp=1"
        )
    if layout.num_layers != model.num_layers:
        raise ConfigError(
            f"layout {layout.describe()} splits {layout.num_layers} layers, "
            f"model {model.name} has {model.num_layers}; make the layout with even_layout({model.num_layers}, ...)"
        )
