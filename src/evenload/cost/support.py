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
    fitting = [
        str(tp)
        for tp in range(1, model.num_heads + 1)
        if not model.num_heads % tp and not (kv_heads % tp and tp % kv_heads)
    ]
    if str(layout.tp) not in fitting:
        raise ConfigError(
            f"layout {layout.describe()}: {model.num_heads} query and {kv_heads} key/value heads of {model.name} do "
            f"not divide over tp={layout.tp}; they do over tp={', '.join(fitting)}"
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
