"""Count what a token costs on one layer, whatever the device: FLOPs, attention pairs, and bytes by activation policy.

FLOPs are for MFU alone: 2 a weight of a matrix product, 4·heads·head_dim a (query, key) pair inside causal mask and
window; backward 2x forward for both, 1x for frozen matrices (LoRA). Look-ups, norms and activations are not counted.

    replay     every linear layer's output (the runtime's default): nothing is computed twice but norms
    recompute  layer input, attention output and log-sum-exp only; backward repeats the layer's matrix products, not
               attention (Korthikanti et al. 2022, the other way round: the expensive part is kept)
    offload    the same tensors as `replay`, copied to host memory while the pack runs, back before its backward

Router logits are kept under every policy on the device: computed again in another batch they could choose other
experts. With norms behind the blocks (Gemma 2 and 3, OLMo 2) the output of the down projection is kept too. K and V
stay on the device, for later slices read them. Under tensor parallelism a device holds its heads and its columns of
the feed-forward block; hidden states are split over tokens; key/value heads fewer than devices are copied.

Workspace of attention's backward, of one layer of one backward pack with T rows in n slices that see K keys; H query
heads, G key heads of dimension D, e bytes an element. As FlashAttention 2's kernels in torch make it (`mha_varlen_bwd`
of torch 2.13). FlashAttention 3 (`mha_bwd`) and 4 (`_flash_attn_bwd`), from their sources and not measured, copy
log-sum-exps (D + 2) and hold gradients of grouped keys as fp32 sums of key heads. It is an estimate: windows are not
counted, and packs of a context-parallel group hold less.

    sums of dQ and of dO·O      4·(T + 128·n)·H·(D + 1)    fp32; every document is rounded up to a block of rows
      added in one order        4·(T + 128·n)·D·S more     of every processor of S apart (`train.deterministic`)
    keys of prefixes            4·e·G·D a key              K and V copied into one tensor, and their gradients
    gradients of grouped keys   2·e·H·D a key, or 8·G·D    where H > G; above `KEY_GRADIENT_BYTES` they are made for
                                                           some key heads at a time (`attention.varlen_cuda`)
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evenload.errors import ConfigError
from evenload.types.columns import causal_pairs
from evenload.types.document import ActivationPolicy
from evenload.types.layout import ParallelLayout
from evenload.types.model import AttentionKernels, ModelSpec

BACKWARD_LINEAR_RATIO = 2.0  # Backward / forward cost of matrix products: dX and dW
BACKWARD_ATTENTION_RATIO = 2.5
"""Backward / forward cost of flash attention: scores again, dQ, dK, dV, dP (5 products against 2)."""


def slice_pairs(start: NDArray, stop: NDArray, window: int = 0, *, causal: bool = True) -> NDArray[np.float64]:
    """Count the (query, key) pairs of slices. A bidirectional model has only whole documents (`start` 0): `stop²`
    within the window."""
    if causal:
        return causal_pairs(start, stop, window)
    tokens = np.asarray(stop, np.float64)
    return tokens * np.minimum(tokens, 2.0 * window + 1) if window else tokens * tokens


def recomputed_share(model: ModelSpec) -> float:
    """Return, of a layer's matrix products forward, the share that the backward of a recomputed document makes again:
    all but the down projection, unless a norm behind it reads its output."""
    if model.post_norm:
        return 1.0
    down = model.hidden_size * model.ffn_hidden_size * max(1, model.experts_per_token)
    return 1.0 - down / model.linear_parameters_per_layer


def forward_flops(model: ModelSpec, num_tokens: ArrayLike) -> NDArray[np.float64]:
    """Count the FLOPs of whole documents forward, with head, without embedding look-up; float64, shape of
    `num_tokens`."""
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
    """Count the model FLOPs of forward and backward of whole documents, less dW of frozen matrices; the numerator of
    MFU."""
    flops = 3.0 * forward_flops(model, num_tokens)
    if model.adapter_parameters_per_layer:
        frozen = 2.0 * model.linear_parameters_per_layer * model.num_layers + 2.0 * model.embedding_parameters
        flops = flops - frozen * np.asarray(num_tokens, np.float64)
    return flops


POLICIES: tuple[ActivationPolicy, ...] = ("replay", "recompute", "offload")
"""Order of the integer codes in policy columns."""
REPLAY, RECOMPUTE, OFFLOAD = range(3)


def activation_bytes_per_token(model: ModelSpec, policy: ActivationPolicy = "replay", tp: int = 1) -> int:
    """Count the bytes of one token on ONE layer between forward and backward, without K and V."""
    if policy == "offload":
        return 0
    query = model.num_heads // tp * model.head_dim
    kept = -(-model.hidden_size // tp) + query + model.num_experts
    log_sum_exp = model.num_heads // tp * accumulator_bytes(model)
    if policy == "replay":
        kept += recomputed_width(model, tp)
    return model.bytes_per_element * kept + log_sum_exp


def recomputed_width(model: ModelSpec, tp: int = 1) -> int:
    """Count the elements a token that `recompute` repeats: q, k, v, o_proj output, gate and up, down where kept."""
    query, key_value = model.num_heads // tp * model.head_dim, local_kv_heads(model, tp) * model.head_dim
    ffn = (2 if model.gated_ffn else 1) * model.ffn_hidden_size * max(1, model.experts_per_token)
    down = -(-model.hidden_size // tp) if model.post_norm else 0
    return query + 2 * key_value - (-model.hidden_size // tp) - (-ffn // tp) + down


def kv_bytes_per_token(model: ModelSpec, tp: int = 1) -> int:
    """Count the bytes of one token's K and V on ONE layer."""
    return model.bytes_per_element * 2 * local_kv_heads(model, tp) * model.head_dim


def kv_gradient_bytes_per_token(model: ModelSpec, tp: int = 1) -> int:
    """Count the bytes of one token's dK and dV sums on ONE layer."""
    return accumulator_bytes(model) * 2 * local_kv_heads(model, tp) * model.head_dim


def local_kv_heads(model: ModelSpec, tp: int) -> int:
    """Return the key/value heads of one device; copies where there are fewer than devices."""
    return max(1, model.num_kv_heads // tp)


def accumulator_bytes(model: ModelSpec) -> int:
    """Return the bytes of a gradient sum: fp32, float64 where the model itself is float64."""
    return 8 if model.bytes_per_element == 8 else 4


def weight_elements_per_token(model: ModelSpec, tp: int = 1) -> int:
    """Count the elements that one token keeps on ONE layer of one device from I to W: inputs, and gradients of outputs.
    Every chosen expert has rows of its own, but for the inputs. Frozen matrices (LoRA) keep nothing; adapters finish in
    I."""
    if model.adapter_parameters_per_layer:
        return 0
    hidden, chosen = -(-model.hidden_size // tp), max(1, model.experts_per_token)
    query, key_value = model.num_heads // tp * model.head_dim, local_kv_heads(model, tp) * model.head_dim
    ffn = model.ffn_hidden_size * chosen
    into_down, into_ffn = -(-ffn // tp), -(-(2 if model.gated_ffn else 1) * ffn // tp)
    inputs = 2 * hidden + query + into_down
    return inputs + (1 + chosen) * hidden + query + 2 * key_value + into_ffn + model.num_experts


# Gradients of grouped keys and values that a kernel holds wider than it returns them.
KEY_GRADIENT_BYTES = 1 << 29
_ROWS_OF_BLOCK = 128
# To whose multiples the keys of every document are rounded up, at most (two processors share a block of Blackwell's).
_KEYS_OF_BLOCK = {"varlen_cuda_fa3": 128, "varlen_cuda_fa4": 256}
_PROCESSORS = 148  # Of the largest GPU that the kernels run on (B200; an H100 has 132)


@dataclass(frozen=True)
class WorkspaceRates:
    """Hold bytes of attention's workspace on one layer.

    Args:
        row, piece: a row, and a slice, of a backward pack.
        prefix_key: a key before a slice.
        grouped_key: wide gradients of a key that a slice sees; grouped_key_head: for one key head.
    """

    row: int = 0
    piece: int = 0
    prefix_key: int = 0
    grouped_key: int = 0
    grouped_key_head: int = 0

    def of_grouped_keys(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """Count the bytes of wide gradients, of packs whose slices see so many keys."""
        most = np.maximum(KEY_GRADIENT_BYTES, keys * self.grouped_key_head)
        return np.minimum(keys * self.grouped_key, most)


def workspace_rates(model: ModelSpec, heads: int, kv_heads: int) -> WorkspaceRates:
    """Return the workspace rates of the heads of one rank."""
    if not model.attention_workspace:
        return WorkspaceRates()
    element, dim, kernels = model.bytes_per_element, model.head_dim, model.attention_kernels
    grouped = key_gradient_bytes(kernels, heads, kv_heads, dim, element)
    if kernels == "varlen_cuda":
        # In one order every call holds `ceil(S / (documents · heads))` sums of dQ: times heads fewer than S + heads.
        sums = heads + (_PROCESSORS - 1 if model.ordered_attention else 0)
        row, rounded_keys = 4 * (sums * _rounded_dim(kernels, dim) + heads), 0
    else:
        row, rounded_keys = 4 * heads * (_rounded_dim(kernels, dim) + 2), _KEYS_OF_BLOCK[kernels]
    return WorkspaceRates(
        row=row,
        piece=_ROWS_OF_BLOCK * row + rounded_keys * grouped,
        prefix_key=4 * element * kv_heads * dim,
        grouped_key=grouped,
        grouped_key_head=grouped // kv_heads,
    )


def key_gradient_bytes(kernels: AttentionKernels, heads: int, kv_heads: int, dim: int, element: int) -> int:
    """Count the bytes of a key's gradients that kernels hold wider than they return them, K and V together; of a whole
    number for every key head."""
    if heads == kv_heads:
        return 0
    if kernels == "varlen_cuda":
        return 2 * element * heads * dim
    return 2 * 4 * kv_heads * _rounded_dim(kernels, dim)


def _rounded_dim(kernels: AttentionKernels, dim: int) -> int:
    """Round a head dimension up as the kernels do in their fp32 sums."""
    if kernels == "varlen_cuda_fa3":
        return next(known for known in (64, 96, 128, 192, 256, dim) if known >= dim)
    step = 64 if kernels == "varlen_cuda" and dim > 128 else 32
    return -(-dim // step) * step


def require_supported_layout(model: ModelSpec, layout: ParallelLayout) -> None:
    """Refuse a layout that would be priced wrong.

    Raises:
        ConfigError: heads that do not divide over tensor ranks, context parallelism of a bidirectional model, or a
            layout for another number of layers.
    """
    heads, kv_heads = model.num_heads, model.num_kv_heads
    fitting = [tp for tp in range(1, heads + 1) if not heads % tp and not (kv_heads % tp and tp % kv_heads)]
    if layout.tp not in fitting:
        raise ConfigError(
            f"layout {layout.describe()}: {heads} query and {kv_heads} key/value heads of {model.name} do not divide "
            f"over tp={layout.tp}; they do over tp={', '.join(map(str, fitting))}"
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
