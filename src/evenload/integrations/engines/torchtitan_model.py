"""A torchtitan decoder in the terms of our cost model, so that packs are balanced for the model that is trained."""

from typing import Any

from evenload.errors import ConfigError
from evenload.types.model import ModelSpec


def model_of(name: str, config: Any) -> ModelSpec:
    """The shape of a dense decoder.

    Args:
        name: shown to users.
        config: torchtitan's `Decoder.Config`; layers all alike, with grouped-query attention and a gated block.

    Raises:
        ConfigError: another kind of model.
    """
    try:
        layers = [_layer_of(layer, config.dim) for layer in config.layers]
        vocab_size, tied = config.vocab_size, config.enable_weight_tying
    except AttributeError as err:
        raise ConfigError(
            f"torchtitan's {name} is no dense decoder of alike layers ({err}); name the model for which packs are "
            'balanced: loader={"model": ...}'
        ) from err
    if len(set(layers)) != 1:
        raise ConfigError(
            f"the layers of torchtitan's {name} differ: {sorted(set(layers))}; name the model for which packs are "
            'balanced: loader={"model": ...}'
        )
    num_heads, num_kv_heads, head_dim, ffn_hidden_size = layers[0]
    return ModelSpec(
        name=name,
        num_layers=len(layers),
        hidden_size=config.dim,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        ffn_hidden_size=ffn_hidden_size,
        vocab_size=vocab_size,
        tied_embeddings=tied,
    )


def _layer_of(layer: Any, hidden_size: int) -> tuple[int, int, int, int]:
    """Heads, key/value heads, width of a head, inner width of the feed-forward block."""
    attention = layer.attention
    num_heads = attention.n_heads
    return (
        num_heads,
        attention.n_kv_heads or num_heads,
        attention.head_dim or hidden_size // num_heads,
        layer.feed_forward.w1.out_features,
    )
