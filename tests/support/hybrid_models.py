"""Tiny models of the ten families of transformers whose layers carry states, as a loop of one's own would have them."""

import torch
from transformers import AutoModelForCausalLM

from reference_training import RECURRENT_KINDS, tiny_config

FAMILIES = tuple(kind for kind in RECURRENT_KINDS if kind != "mamba2")
"""Those that also attend."""


def hybrid_model(kind, **changes):
    """Two layers, of recurrence and of attention, with weights at which every part counts."""
    torch.manual_seed(1)
    config = tiny_config(kind, num_hidden_layers=2, **changes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1 or "conv" in name:
                weight += 0.3 * torch.randn_like(weight)
    return model
