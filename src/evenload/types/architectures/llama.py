"""Llama, and Mistral's dense and sparse models, which are built like it."""

from evenload.types.architectures.architecture import Architecture, ExpertNames

EXPERTS_UNCUT = "has experts: their matrices are not cut in this version"
"""Why tensor parallelism refuses a model with experts."""

FAMILY = (
    Architecture(model_type="llama", classes="Llama"),
    Architecture(model_type="mistral", classes="Mistral"),
    Architecture(
        model_type="mixtral",
        classes="Mixtral",
        experts=ExpertNames("block_sparse_moe", gate="w1", up="w3", down="w2"),
        uncut=EXPERTS_UNCUT,
    ),
)
