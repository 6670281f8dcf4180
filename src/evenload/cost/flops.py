"""Attention pairs and true FLOPs of documents.

Conventions, used for MFU and nothing else:
- a matrix product of a token with a weight costs 2 FLOPs a weight; attention costs 4·heads·head_dim FLOPs a
  (query, key) pair (QK and PV, 2 each), only pairs inside the causal mask and the sliding window count;
- backward counts 2x forward for both, so a training step is 3x forward. Cost (seconds) charges attention's
  backward 2.5x by default because flash kernels recompute scores (SlimPack §2.2.2); that recomputation is not
  useful work, so MFU does not count it (the usual "model FLOPs", no recompute);
- a frozen matrix (LoRA) has no dW, so its backward is 1x forward; adapters themselves count as any matrix;
- the embedding look-up is 0, norms and activations are not counted.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evenload.types.model import ModelSpec
from evenload.types.work import causal_pairs

BACKWARD_LINEAR_RATIO = 2.0
"""Backward / forward cost of matrix products: dX and dW."""
BACKWARD_ATTENTION_RATIO = 2.5
"""Backward / forward cost of flash attention: scores again, dQ, dK, dV, dP (5 products against 2)."""


def slice_pairs(start: NDArray, stop: NDArray, window: int = 0, *, causal: bool = True) -> NDArray[np.float64]:
    """Pairs of slices. A bidirectional model has only whole documents (`start` 0): `stop²` within the window."""
    if causal:
        return causal_pairs(start, stop, window)
    tokens = np.asarray(stop, np.float64)
    return tokens * np.minimum(tokens, 2.0 * window + 1) if window else tokens * tokens


def backward_linear_ratio(model: ModelSpec) -> float:
    """Backward / forward of the model's own matrix products: frozen ones (LoRA) have no dW."""
    return 1.0 if model.adapter_parameters_per_layer else BACKWARD_LINEAR_RATIO


def recomputed_share(model: ModelSpec) -> float:
    """Of a layer's matrix products forward, those that the backward of a recomputed document makes again: all but the
    down projection, unless a norm behind it reads its output."""
    if model.post_norm:
        return 1.0
    down = model.hidden_size * model.ffn_hidden_size * max(1, model.experts_per_token)
    return 1.0 - down / model.linear_parameters_per_layer


def forward_flops(model: ModelSpec, num_tokens: ArrayLike) -> NDArray[np.float64]:
    """FLOPs of whole documents forward, with head, without embedding look-up; float64, shape of `num_tokens`."""
    tokens = np.asarray(num_tokens, np.float64)
    layer = model.linear_parameters_per_layer + model.adapter_parameters_per_layer
    linear = 2.0 * layer * model.num_layers + 2.0 * model.embedding_parameters
    flops = linear * tokens
    zero = np.zeros_like(tokens)
    for window in sorted(set(model.windows)):
        pairs = slice_pairs(zero, tokens, window, causal=model.causal)
        flops = flops + 4.0 * model.num_heads * model.head_dim * model.windows.count(window) * pairs
    return flops


def training_flops(model: ModelSpec, num_tokens: ArrayLike) -> NDArray[np.float64]:
    """Model FLOPs of forward and backward of whole documents; the numerator of MFU.

    3x forward; with LoRA adapters 3x forward less dW of the frozen matrices.
    """
    flops = 3.0 * forward_flops(model, num_tokens)
    if model.adapter_parameters_per_layer:
        frozen = 2.0 * model.linear_parameters_per_layer * model.num_layers + 2.0 * model.embedding_parameters
        flops = flops - frozen * np.asarray(num_tokens, np.float64)
    return flops
