"""Every architecture by `model_type`; a new one is a file beside this one and a name in the list below."""

from collections.abc import Mapping

from evenload.types.architectures import gemma, gpt2, llama, olmo, planned, qwen
from evenload.types.architectures.architecture import Architecture

ARCHITECTURES: Mapping[str, Architecture] = {
    architecture.model_type: architecture
    for family in (gemma, gpt2, llama, olmo, planned, qwen)
    for architecture in family.FAMILY
}
"""What is planned; others are refused by name, because they would be planned wrong."""

TRAINED: Mapping[str, Architecture] = {
    architecture.causal_class: architecture for architecture in ARCHITECTURES.values() if architecture.classes
}
"""What is trained, by transformers' class of the whole model; proven equal to transformers by tests/runtime."""
