"""`LoraConfig`: the `[model.lora]` section, and which linears get adapters of what size. Needs no torch."""

from collections.abc import Mapping

import msgspec

from evenload.errors import ConfigError
from evenload.types.base import Frozen, PathText, write_out_home
from evenload.types.model import ModelSpec


class LoraConfig(Frozen):
    """Train LoRA adapters instead of the model's own weights, which stay frozen.

    Args:
        rank: of the adapters.
        alpha: an adapter's output is multiplied by alpha / rank.
        target_modules: linears of every layer that get an adapter, by their last name; empty = all of them.
        dropout: must be 0, because a mask would differ between forward and backward packs.
        path: a PEFT directory whose adapter to go on from; None = a new one, which begins as no change at all.
    """

    rank: int = 16
    alpha: float = 32.0
    target_modules: tuple[str, ...] = ()
    dropout: float = 0.0
    path: PathText | None = None

    def __post_init__(self) -> None:
        write_out_home(self)
        if self.rank < 1:
            raise ConfigError(f"model.lora.rank is {self.rank}, must be at least 1")
        if self.alpha <= 0:
            raise ConfigError(f"model.lora.alpha is {self.alpha}, must be above 0")
        if self.dropout != 0:
            raise ConfigError(
                f"model.lora.dropout is {self.dropout}, must be 0: a dropout mask would differ between forward and "
                "backward packs"
            )


def with_adapters(model: ModelSpec, lora: LoraConfig | None) -> ModelSpec:
    """A model that trains rank·(in + out) elements of every linear with an adapter, and nothing else. `ConfigError` for
    a target module that the layer does not have."""
    if lora is None:
        return model
    sizes = linear_sizes(model)
    trained = sum(lora.rank * sum(sizes[name]) for name in target_linears(sizes, lora))
    return msgspec.structs.replace(model, adapter_parameters_per_layer=trained)


def linear_sizes(model: ModelSpec) -> dict[str, tuple[int, int]]:
    """(in, out) of a layer's linears. Experts are no linears: all of a layer are one tensor."""
    hidden, query, key_value = model.hidden_size, model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    sizes = {
        "q_proj": (hidden, query),
        "k_proj": (hidden, key_value),
        "v_proj": (hidden, key_value),
        "o_proj": (query, hidden),
    }
    if not model.num_experts:
        sizes |= dict.fromkeys(("gate_proj", "up_proj"), (hidden, model.ffn_hidden_size))
        sizes["down_proj"] = (model.ffn_hidden_size, hidden)
    return sizes


def target_linears(known: Mapping[str, object], lora: LoraConfig) -> list[str]:
    """Names of the linears that get adapters, in the order of a layer.

    Args:
        known: by name, the linears of a layer that may have one.

    Raises:
        ConfigError: `target_modules` names something else.
    """
    for name in lora.target_modules:
        if name not in known:
            raise ConfigError(
                f"model.lora.target_modules has '{name}'; a layer of this model has the linears "
                f"{', '.join(known)} (experts, embedding and head cannot have adapters)"
            )
    return [name for name in known if not lora.target_modules or name in lora.target_modules]
