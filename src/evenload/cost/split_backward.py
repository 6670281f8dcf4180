"""A backward pack as I and W (zero bubble; Qi et al. 2023): seconds and bytes of both.

W is one of the two equal products of every linear layer's backward (dW; the other is dX) and its part of the constants
that come with them: the share of these seconds that was measured, else half. Attention has no weights: all of it, of
the norms and of the embedding stays in I. So does the head: its logits live for a block of rows only
(`cost.memory.HEAD_ROWS`), and keeping them for W would cost vocab·(e + 4) bytes a token. Under tensor parallelism W
gathers again the rows that I has let go (`group_comm.WEIGHT_RINGS`): I and W together then take longer than the whole
backward.

From I to W stay, per token and layer, the inputs of the matrix products and the gradients of their outputs, which
`runtime/replay/weight_products.py` keeps as they are, so that W computes nothing but products:

    inputs      e·(2·hidden + q + ffn)             of q k v (one for the three), o_proj, gate and up, down
    gradients   e·(2·hidden + q + 2·kv + 2·ffn)    of q k v, o_proj, gate and up, down

That is more than the backward gives back, so delaying W costs memory. Counted for the tokens of the backward pack, and
beside the forward's chunk until I ends: the attention output, which is in both, counts twice until then, and for as
long as the chunk stays where it outlives I. Never too little.
"""

import numpy as np
from numpy.typing import NDArray

from evenload.cost.activation import local_kv_heads
from evenload.cost.coefficients import CostCoefficients
from evenload.cost.group_comm import weight_gather_seconds
from evenload.types.columns import SliceColumns
from evenload.types.layout import ParallelLayout
from evenload.types.model import ModelSpec
from evenload.types.pipeline import PipelineTasks, SplitBackward

_HALF = 0.5
"""Of the products of linear layers' backward, those of weight gradients; taken where nobody measured their seconds."""


def gather_seconds(
    model: ModelSpec, coefficients: CostCoefficients, layout: ParallelLayout, backward: SliceColumns
) -> NDArray[np.float64]:
    """What I and W of every backward pack take beyond the whole backward: tensor-parallel transfers made again in W;
    float64[m_b, P]."""
    token_s, pack_s = weight_gather_seconds(model, coefficients, layout.tp)
    return np.outer(backward.rank_tokens() * token_s + pack_s, np.array(layout.stage_counts, np.float64))


def weight_share(model: ModelSpec, coefficients: CostCoefficients) -> float:
    """Of the backward of linear layers, what W may defer; nothing where the matrices are frozen (LoRA)."""
    if model.adapter_parameters_per_layer:
        return 0.0
    return _HALF if coefficients.weight_share is None else coefficients.weight_share


def weight_seconds(
    model: ModelSpec,
    coefficients: CostCoefficients,
    layout: ParallelLayout,
    tokens: NDArray[np.int64],
    backward_s: NDArray[np.float64],
    copy_s: NDArray[np.float64] | None,
) -> NDArray[np.float64]:
    """What W defers of every backward; float64[m_b, P].

    Args:
        tokens: int64[m_b], of the rank.
        backward_s: float64[m_b, P], whole backwards.
        copy_s: float64[m_b, P], of what comes back from the host; None = nothing does.
    """
    share, per_layer = weight_share(model, coefficients), coefficients.backward
    layer_s = tokens * (per_layer.linear_s_per_token / layout.tp) + per_layer.pack_s
    weight_s = share * np.outer(layer_s, np.array(layout.stage_counts, np.float64))
    # The head and exposed transfers come on top in I, so W is never more than this share of the whole.
    weight_s = np.minimum(weight_s, share * backward_s)
    # I needs all that comes back from the host; while it waits, a part of W's work is done.
    return weight_s if copy_s is None else np.minimum(weight_s, backward_s - copy_s)


def divide_backward(
    model: ModelSpec,
    layout: ParallelLayout,
    tasks: PipelineTasks,
    backward: SliceColumns,
    input_s: NDArray[np.float64],
    weight_s: NDArray[np.float64],
) -> SplitBackward:
    """The bytes of I and W beside known seconds.

    Args:
        input_s, weight_s: float64[m_b, P].
    """
    tokens, layers = backward.rank_tokens(), np.array(layout.stage_counts, np.int64)
    element = model.bytes_per_element
    held = np.outer(tokens, layers * (element * weight_elements_per_token(model, layout.tp)))
    return SplitBackward(
        input_s=input_s,
        weight_s=weight_s,
        input_freed_bytes=tasks.held.backward_freed_bytes - held,
        input_temp_bytes=tasks.held.backward_temp_bytes + held,
        weight_freed_bytes=held,
    )


def weight_elements_per_token(model: ModelSpec, tp: int = 1) -> int:
    """Elements one token leaves on ONE layer of one device from I to W: inputs, and gradients of outputs.

    Of experts every chosen one has its own rows, but the inputs, which the router shares with them. Frozen matrices
    (LoRA) leave nothing, and the weight gradients of adapters are added in I.
    """
    if model.adapter_parameters_per_layer:
        return 0
    hidden, chosen = -(-model.hidden_size // tp), max(1, model.experts_per_token)
    query, key_value = model.num_heads // tp * model.head_dim, local_kv_heads(model, tp) * model.head_dim
    ffn = model.ffn_hidden_size * chosen
    into_down, into_ffn = -(-ffn // tp), -(-(2 if model.gated_ffn else 1) * ffn // tp)
    inputs = 2 * hidden + query + into_down
    return inputs + (1 + chosen) * hidden + query + 2 * key_value + into_ffn + model.num_experts
