"""Qwen 2 and 3, dense and with experts."""

from evenload.types.architectures.architecture import Architecture, ExpertNames
from evenload.types.architectures.llama import EXPERTS_UNCUT

FAMILY = (
    Architecture(model_type="qwen2", classes="Qwen2", optional_window=True, first_layers_full=True),
    Architecture(model_type="qwen3", classes="Qwen3", optional_window=True, first_layers_full=True),
    Architecture(
        model_type="qwen3_moe",
        classes="Qwen3Moe",
        optional_window=True,
        experts=ExpertNames("mlp", "gate_proj", "up_proj", "down_proj"),
        uncut=EXPERTS_UNCUT,
    ),
)
