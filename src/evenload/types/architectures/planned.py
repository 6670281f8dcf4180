"""Architectures that are planned and simulated, not trained."""

from evenload.types.architectures.architecture import Architecture

FAMILY = (
    Architecture(model_type="bert", tied=True, gated=False, causal=False),
    Architecture(model_type="gpt_neox", gated=False),
    Architecture(model_type="granite"),
    Architecture(model_type="phi", gated=False),
    Architecture(model_type="phi3"),
    Architecture(model_type="roberta", tied=True, gated=False, causal=False),
    Architecture(model_type="seed_oss"),
    Architecture(model_type="starcoder2", tied=True, gated=False),
)
