"""Count what a token costs on one layer, whatever the device: FLOPs, attention pairs, and bytes by activation policy.

FLOPs are for MFU alone: 2 a weight of a matrix product, 2·heads·(width of keys + of values) a (query, key) pair inside
causal mask and window, 2 a multiply-add of a function that carries a state (`StateKind.products`); backward 2x forward
for all, 1x for frozen matrices (LoRA). Look-ups, norms and activations are not counted.

Numbers of layers are arrays over the model's kinds of layers (K = len(ModelSpec.kinds)); `over_kinds` adds them up over
the layers of stages.

    replay     every linear layer's output (the runtime's default): nothing is computed twice but norms
    recompute  layer input, attention output and log-sum-exp only; backward repeats the layer's matrix products, not
               attention (Korthikanti et al. 2022, the other way round: the expensive part is kept)
    offload    the same tensors as `replay`, copied to host memory while the pack runs, back before its backward

Router logits and what they choose are kept under every policy on the device: computed again in another batch they could
choose other experts. What functions that carry a state give is kept under none: backward runs them. With norms behind
the blocks (Gemma 2 and 3, OLMo 2) the output of the down projection is kept too. K and V stay on the device, for later
slices read them. Under tensor parallelism a device holds its heads and its columns of the feed-forward block; hidden
states are split over tokens; key/value heads fewer than devices are copied.

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

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evenload.errors import ConfigError
from evenload.types.columns import causal_pairs
from evenload.types.document import ActivationPolicy
from evenload.types.layer_kind import AttentionKind, LayerKind
from evenload.types.layout import ParallelLayout
from evenload.types.model import AttentionKernels, ModelSpec
from evenload.types.tree_columns import NO_TREES, TreeColumns

STATE_SLOWNESS = 8.0
"""Seconds of a multiply-add in functions that carry a state, small products between elementwise work, over one of a
layer's matrix products: a token takes small recurrent layers of three families 2.6, 3.0 and 1.1 times as long as their
layers of attention on a CPU, and by this number 2.7, 2.8 and 1.1 times. Assumed of GPUs."""
SCAN_SLICES = 8.0
"""What a slice costs a scan, which is called slice by slice, over what it costs attention: 5 and 13 there."""
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


@dataclass(frozen=True, eq=False)
class KindShares:
    """Hold what a layer of every kind costs in shares of the model's mean layer, to which coefficients belong; exactly
    1 where layers are alike. float64[K] each.

    Args:
        linear: of the mean layer's matrix products and functions that carry a state, by their seconds; matrices: of its
            matrix products alone; attention, keys: of a (query, key) pair, and of keys and values, on the mean of
            layers with attention.
        again: of the mean layer's matrix products, what the backward of a recomputed document makes again: those whose
            output it reads.
        repeated: what every backward runs again: matrix products of mixers, and functions that carry a state.
        first: of the mean layer's matrix products, the first ones of experts, which backward runs again where they are
            spread over ranks.
        reach: `AttentionKind.reach`; None = no attention.
        pieces: of what a slice costs the mean layer, whatever its length.
        mean_products, mean_pair_width, mean_key_width: weights of matrices that a token uses on the mean layer (active
            experts only), with as many for functions that carry a state as take their seconds; products of a pair,
            elements of a token's keys and values.
        matrix_share: of `mean_products`, those of matrices, where layers have any.
        mean_pieces: of the mean layer, in slices of a layer without states.
    """

    linear: NDArray[np.float64]
    matrices: NDArray[np.float64]
    attention: NDArray[np.float64]
    keys: NDArray[np.float64]
    again: NDArray[np.float64]
    repeated: NDArray[np.float64]
    first: NDArray[np.float64]
    pieces: NDArray[np.float64]
    reach: tuple[int | None, ...]
    mean_products: float
    mean_pair_width: float
    mean_key_width: float
    matrix_share: float
    mean_pieces: float

    @property
    def reaches(self) -> tuple[int, ...]:
        """The distinct ones, ascending; of a model without attention that of a layer with full attention."""
        return tuple(sorted({reach for reach in self.reach if reach is not None})) or (0,)

    def of_reach(self, shares: NDArray[np.float64], reach: int) -> NDArray[np.float64]:
        """Return the shares of kinds of this reach; 0 of others."""
        return shares * np.array([own == reach for own in self.reach])


def kind_shares(model: ModelSpec) -> KindShares:
    return _shares(model.kinds, model.kind_counts)


@lru_cache(maxsize=64)
def _shares(kinds: tuple[LayerKind, ...], of_kinds: tuple[int, ...]) -> KindShares:
    counts = np.array(of_kinds, np.float64)
    products = np.array([kind.active_products for kind in kinds], np.float64)
    linear = products + STATE_SLOWNESS * np.array([kind.state_products for kind in kinds], np.float64)
    repeated = linear - products + np.array([kind.mixed_products for kind in kinds], np.float64)
    pieces = np.array([1.0 + SCAN_SLICES * sum(one.is_scan for one in kind.states) for kind in kinds])
    unread = np.array([kind.unread_products for kind in kinds], np.float64)
    pairs = np.array([kind.attention.pair_width if kind.attention else 0 for kind in kinds], np.float64)
    keys = np.array([kind.attention.key_width if kind.attention else 0 for kind in kinds], np.float64)

    means = [_mean(values, counts) for values in (linear, products, pairs, keys, pieces)]
    mean_products, mean_matrices, mean_pairs, mean_keys, mean_pieces = means
    return KindShares(
        linear=linear / mean_products,
        attention=pairs / mean_pairs,
        keys=keys / mean_keys,
        matrices=products / mean_matrices,
        repeated=repeated / mean_products,
        first=np.array([kind.experts.width * kind.experts.first_outputs if kind.experts else 0 for kind in kinds])
        / mean_products,
        pieces=pieces / mean_pieces,
        again=products / mean_products * (1.0 - unread / np.maximum(products, 1.0)),
        reach=tuple(kind.attention.reach if kind.attention else None for kind in kinds),
        mean_products=mean_products,
        mean_pair_width=mean_pairs,
        mean_key_width=mean_keys,
        matrix_share=mean_matrices / mean_products,
        mean_pieces=mean_pieces,
    )


def _mean(values: NDArray[np.float64], counts: NDArray[np.float64]) -> float:
    """Return the mean over layers that have any of it; 1 where none has."""
    having = values > 0
    return float(values[having] @ counts[having] / counts[having].sum()) if having.any() else 1.0


def stage_kinds(model: ModelSpec, layout: ParallelLayout, *, recomputed: bool = False) -> NDArray[np.int64]:
    """Count the layers of every kind on every virtual stage, or those of them that are always recomputed;
    int64[P, K], not to be changed."""
    stages = layout.stage_layers
    if recomputed:
        stages = tuple(
            (first, first + count) for (first, _), count in zip(stages, layout.recomputed_counts, strict=True)
        )
    return _kinds_of(model.layers, stages)


@lru_cache(maxsize=256)
def _kinds_of(layers: tuple[int, ...], stages: tuple[tuple[int, int], ...]) -> NDArray[np.int64]:
    kinds = range(max(layers) + 1)
    return np.array([[layers[first:last].count(kind) for kind in kinds] for first, last in stages], np.int64)


def over_kinds(counts: NDArray[np.int64], values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Add up values of kinds (float64[K]) over the layers of stages (int64[P, K]); layers of one value count together,
    so that windows alone change no bit. float64[P]."""
    by_value: dict[float, NDArray[np.int64]] = {}
    for at, value in enumerate(values.tolist()):
        by_value[value] = by_value[value] + counts[:, at] if value in by_value else counts[:, at]
    total = np.zeros(len(counts))
    for value, count in by_value.items():
        total += count * value
    return total


def mean_of_layers(model: ModelSpec, values: NDArray[np.int64]) -> int:
    """Return the mean of values of kinds (int64[K]) over the model's layers, rounded up."""
    return -int(-(np.array(model.kind_counts) @ values) // model.num_layers)


def most_of_stage(counts: NDArray[np.int64], values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the most that any layer of a stage has; int64[P]."""
    return ((counts > 0) * values).max(axis=1)


def forward_flops(model: ModelSpec, num_tokens: ArrayLike, trees: TreeColumns = NO_TREES) -> NDArray[np.float64]:
    """Count the FLOPs of whole documents forward, with head, without embedding look-up, shared prefixes of `trees`
    once; float64, shape of `num_tokens`."""
    tokens = np.asarray(num_tokens, np.float64)
    weights = model.kind_counts @ _of_kinds(
        model, lambda kind: kind.active_products + kind.state_products + kind.adapter_parameters
    )
    flops = (2.0 * weights + 2.0 * model.embedding_parameters) * tokens
    zero = np.zeros_like(tokens)
    for reach in kind_shares(model).reaches:
        attentions = [(count, kind.attention) for count, kind in zip(model.kind_counts, model.kinds, strict=True)]
        widths = sum(count * one.pair_width for count, one in attentions if one and one.reach == reach)
        if trees.has_any:
            pairs = trees.sums(slice_pairs(trees.depth, trees.depth_stop, reach))
        else:
            pairs = slice_pairs(zero, tokens, reach, causal=model.causal)
        flops = flops + 2.0 * widths * pairs
    return flops


def training_flops(model: ModelSpec, num_tokens: ArrayLike, trees: TreeColumns = NO_TREES) -> NDArray[np.float64]:
    """Count the model FLOPs of forward and backward of whole documents, less dW of frozen matrices, as MFU does."""
    flops = 3.0 * forward_flops(model, num_tokens, trees)
    if model.has_adapters:
        weights = model.kind_counts @ _of_kinds(model, lambda kind: kind.active_products)
        frozen = 2.0 * weights + 2.0 * model.embedding_parameters
        flops = flops - frozen * np.asarray(num_tokens, np.float64)
    return flops


CHOICE_BYTES = 8  # Of the number of an expert, int64


POLICIES: tuple[ActivationPolicy, ...] = ("replay", "recompute", "offload")
"""Order of the integer codes in policy columns."""
REPLAY, RECOMPUTE, OFFLOAD = range(3)


def _of_kinds(model: ModelSpec, count: Callable[[LayerKind], int]) -> NDArray[np.int64]:
    return np.array([count(kind) for kind in model.kinds], np.int64)


def activation_bytes_per_token(model: ModelSpec, policy: ActivationPolicy = "replay", tp: int = 1) -> NDArray[np.int64]:
    """Count the bytes of one token on ONE layer between forward and backward, without K and V; int64[K]."""
    element, statistic = model.bytes_per_element, accumulator_bytes(model)

    def kept_bytes(kind: LayerKind) -> int:
        attention, experts = kind.attention, kind.experts
        kept, copied, numbers_bytes = model.hidden_size, 0, 0
        if policy == "replay":
            kept, copied = kept + _outputs(kind, tp, only_read=True), _copied_keys(attention, tp)
        if attention and attention.is_kept:
            kept, numbers_bytes = kept + attention.heads * attention.value_dim, statistic * attention.heads
        if experts:
            # Routers run on own rows.
            kept += experts.router + experts.is_read * experts.width + experts.cast_router * (element >= 4)
            numbers_bytes += CHOICE_BYTES * experts.choices
        return element * copied - (-(element * kept + numbers_bytes) // tp)

    return _of_kinds(model, kept_bytes if policy != "offload" else lambda kind: 0)


def recomputed_width(model: ModelSpec, tp: int = 1) -> NDArray[np.int64]:
    """Count the elements a token that `recompute` repeats: outputs of products that backward reads, and of experts'
    first ones; int64[K]."""
    return _of_kinds(model, lambda kind: _copied_keys(kind.attention, tp) - (-_outputs(kind, tp, only_read=True) // tp))


def _outputs(kind: LayerKind, tp: int, *, only_read: bool = False) -> int:
    """Count the elements that a token has of the outputs of products on all devices together, which divide them,
    without copies. Experts on several devices keep none from forward on."""
    outputs = sum(one.rows * one.outputs for one in kind.products if one.is_read or not (only_read or one.in_mixer))
    if kind.experts is not None and not (only_read and tp > 1):
        outputs += kind.experts.first_outputs
    return outputs


def _copied_keys(attention: AttentionKind | None, tp: int) -> int:
    """Count a token's elements of keys and values on one device beyond its share of them."""
    if attention is None:
        return 0
    share = sum(-(-attention.kv_heads * width // tp) for width in (attention.head_dim, attention.value_dim))
    return attention.local_key_width(tp) - share


def kv_bytes_per_token(model: ModelSpec, tp: int = 1) -> NDArray[np.int64]:
    """Count the bytes of one token's K and V on ONE layer; int64[K]."""
    return model.bytes_per_element * _kept_keys(model, tp)


def kv_gradient_bytes_per_token(model: ModelSpec, tp: int = 1) -> NDArray[np.int64]:
    """Count the bytes of one token's dK and dV sums on ONE layer; int64[K]."""
    return accumulator_bytes(model) * _kept_keys(model, tp)


def state_bytes(model: ModelSpec, tp: int = 1) -> NDArray[np.int64]:
    """Count the bytes of the states of one document at one cut on ONE layer of one device, which has its share of the
    heads, and of their gradients; int64[K]."""
    narrow, wide = model.bytes_per_element, accumulator_bytes(model)
    return _of_kinds(
        model, lambda kind: sum(-(-one.state // tp) * (wide if one.is_wide else narrow) for one in kind.states)
    )


def state_width(model: ModelSpec, tp: int = 1) -> NDArray[np.int64]:
    """Count the elements a token that the widest function that carries a state reads and gives on one device;
    int64[K]."""
    return _of_kinds(model, lambda kind: max((-(-(one.inputs + one.outputs) // tp) for one in kind.states), default=0))


def _kept_keys(model: ModelSpec, tp: int) -> NDArray[np.int64]:
    attentions = (kind.attention for kind in model.kinds)
    return np.array([one.local_key_width(tp) if one and one.is_kept else 0 for one in attentions], np.int64)


def accumulator_bytes(model: ModelSpec) -> int:
    """Return the bytes of a gradient sum: fp32, float64 where the model itself is float64."""
    return 8 if model.bytes_per_element == 8 else 4


def weight_bytes_per_token(model: ModelSpec, tp: int = 1) -> NDArray[np.int64]:
    """Count the bytes that one token keeps on ONE layer of one device from I to W: inputs, and gradients of outputs;
    int64[K]. Every chosen expert has rows of its own, but for the inputs. Frozen matrices (LoRA) keep nothing; adapters
    finish in I."""
    element, has_adapters = model.bytes_per_element, model.has_adapters
    return _of_kinds(model, lambda kind: 0 if has_adapters else _weight_bytes(kind, tp, element))


def _weight_bytes(kind: LayerKind, tp: int, element: int) -> int:
    kept = _outputs(kind, tp)
    kept += sum(one.rows * one.inputs for one in kind.products if not (one.shares_input or one.in_mixer))
    if experts := kind.experts:
        # Rows that other devices send are copies, one for every chosen expert.
        copies = experts.chosen if tp == 1 else 2 * experts.chosen
        kept += (copies + (not experts.shares_input)) * experts.width + experts.inner * experts.chosen + experts.router
    return element * _copied_keys(kind.attention, tp) - (-element * kept // tp)


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


def workspace_rates(model: ModelSpec, tp: int) -> WorkspaceRates:
    """Return the workspace rates of the heads of one rank: of every rate, that of the kind that has most."""
    if not model.attention_workspace or not model.attentions:
        return WorkspaceRates()
    of_kinds = [_kind_rates(model, attention, tp) for attention in model.attentions]
    return WorkspaceRates(**{name: max(getattr(one, name) for one in of_kinds) for name in vars(of_kinds[0])})


def _kind_rates(model: ModelSpec, attention: AttentionKind, tp: int) -> WorkspaceRates:
    element, kernels = model.bytes_per_element, model.attention_kernels
    heads, kv_heads = attention.heads // tp, attention.local_kv_heads(tp)
    dim = max(attention.head_dim, attention.value_dim)  # kernels take one width for both
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
        ConfigError: heads that do not divide over tensor ranks, context parallelism of a model whose documents ranks
            do not share, or a layout for another number of layers.
    """
    groups = sorted({(one.heads, one.kv_heads) for one in model.attentions})
    fitting = [
        tp
        for tp in range(1, min((heads for heads, _ in groups), default=layout.tp) + 1)
        if all(not heads % tp and not (kv_heads % tp and tp % kv_heads) for heads, kv_heads in groups)
    ]
    if layout.tp not in fitting:
        heads, kv_heads = (", ".join(dict.fromkeys(str(group[at]) for group in groups)) for at in (0, 1))
        raise ConfigError(
            f"layout {layout.describe()}: {heads} query and {kv_heads} key/value heads of {model.name} do not divide "
            f"over tp={layout.tp}; they do over tp={', '.join(map(str, fitting))}"
        )
    if layout.cp > 1 and not model.may_cut_documents:
        why = "is bidirectional" if not model.causal else f"has {', '.join(model.mixers)}, which needs documents whole,"
        raise ConfigError(
            f"layout {layout.describe()}: model {model.name} {why} and context parallelism shards causal documents "
            "only; use cp=1"
        )
    if layout.num_layers != model.num_layers:
        raise ConfigError(
            f"layout {layout.describe()} splits {layout.num_layers} layers, "
            f"model {model.name} has {model.num_layers}; make the layout with even_layout({model.num_layers}, ...)"
        )


OR_NO_TREES = "or data that shares none (no data.group_by, preference pairs, or lists in records)"


def require_trees(model: ModelSpec, layout: ParallelLayout) -> None:
    """Refuse trees of shared prefixes of a model or in a layout that does not run them, by a `ConfigError`."""
    why = f"layout {layout.describe()} divides documents over ranks; use cp=1" if layout.cp > 1 else ""
    if not model.may_cut_documents or model.state_functions:
        why = f"model {model.name} has other layers than of causal attention; use another"
    if why:
        raise ConfigError(f"trees of shared prefixes: {why}, {OR_NO_TREES}")
