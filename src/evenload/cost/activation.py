"""Bytes one token leaves on one layer of one device, by activation policy and tensor-parallel size.

    replay     every linear layer's output (the runtime's default): nothing is computed twice but norms
    recompute  layer input, attention output and log-sum-exp only; backward repeats the layer's matrix products,
               not attention (Korthikanti et al. 2022, "selective recomputation", the other way round: we keep the
               expensive part and repeat the cheap one)
    offload    the same tensors as `replay`, copied to host memory while the pack runs, back before its backward

Where experts are, the router's logits are kept under `replay` and `recompute`: computed again in other company they
may differ in the last bit, and a token that was near a tie would go back through other experts than it came. With
norms behind the blocks (Gemma 2 and 3, OLMo 2) the output of the down projection is kept too.

K and V stay on the device under every policy: later slices of the document read them. Under tensor parallelism
a device holds its heads and its columns of the feed-forward block; hidden states between blocks are split over
tokens (sequence parallelism). Key/value heads fewer than devices are copied.
"""

from evenload.types.micropack import ActivationPolicy
from evenload.types.model import ModelSpec

POLICIES: tuple[ActivationPolicy, ...] = ("replay", "recompute", "offload")
"""Order of the integer codes in policy columns."""
REPLAY, RECOMPUTE, OFFLOAD = range(3)


def activation_bytes_per_token(model: ModelSpec, policy: ActivationPolicy = "replay", tp: int = 1) -> int:
    """Bytes one token leaves on ONE layer of the device between forward and backward, without K and V."""
    if policy == "offload":
        return 0
    query = model.num_heads // tp * model.head_dim
    kept = -(-model.hidden_size // tp) + query + model.num_experts
    log_sum_exp = model.num_heads // tp * accumulator_bytes(model)
    if policy == "replay":
        kept += recomputed_width(model, tp)
    return model.bytes_per_element * kept + log_sum_exp


def recomputed_width(model: ModelSpec, tp: int = 1) -> int:
    """Elements a token that `recompute` makes again: q, k, v, o_proj output, gate and up, down where it is kept."""
    query, key_value = model.num_heads // tp * model.head_dim, local_kv_heads(model, tp) * model.head_dim
    ffn = (2 if model.gated_ffn else 1) * model.ffn_hidden_size * max(1, model.experts_per_token)
    down = -(-model.hidden_size // tp) if model.post_norm else 0
    return query + 2 * key_value - (-model.hidden_size // tp) - (-ffn // tp) + down


def kv_bytes_per_token(model: ModelSpec, tp: int = 1) -> int:
    """Bytes of one token's K and V on ONE layer."""
    return model.bytes_per_element * 2 * local_kv_heads(model, tp) * model.head_dim


def kv_gradient_bytes_per_token(model: ModelSpec, tp: int = 1) -> int:
    """Bytes of one token's dK and dV sums on ONE layer."""
    return accumulator_bytes(model) * 2 * local_kv_heads(model, tp) * model.head_dim


def local_kv_heads(model: ModelSpec, tp: int) -> int:
    """Key/value heads of one device; copies where there are fewer than devices."""
    return max(1, model.num_kv_heads // tp)


def accumulator_bytes(model: ModelSpec) -> int:
    """fp32 sums, float64 where the model itself is float64."""
    return 8 if model.bytes_per_element == 8 else 4
