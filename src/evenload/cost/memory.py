"""Count the bytes that a pipeline rank holds, as the runtime accounts for them.

Kept between forward and backward (e = bytes per element, L = layers of the stage, T = tokens), here of layers all alike
with a gated block; of others what their kinds have (`cost.layer_counts`):

    chunk     per (document, forward slice), from that forward's start:
              T·L·(e·(hidden + (Hq+2·Hkv)·D + Hq·D + hidden + 2·ffn) + Hq·lse)   layer input, q k v outputs,
              attention output, o_proj output, gate and up; lse: 4 bytes a head and token (8 when e is 8);
              last stage + T·e·hidden (final hidden states).
              Freed when the backward slice with the chunk's FIRST token ends: a chunk is one tensor.
    K and V   whole document, T·L·e·2·Hkv·D, from its first forward slice until the backward slice with start 0 ends.
    dK and dV whole document, T·L·4·2·Hkv·D (8 when e is 8), only for documents cut in BACKWARD, from the first
              backward slice until the slice with start 0 ends: negative `backward_freed_bytes` of the pack that
              allocates them, and in its `backward_temp_bytes`.
    states    S bytes a document and cut of functions that carry a state (`StateKind`): of a forward slice the running
              one, taken where it starts after token 0 and left where it ends before the document does, and one for
              every cut of backward in it (its own start too), which the forward leaves behind. A backward slice gives
              S back that ends before the document does: it takes the gradient of the state at its end, while in place
              of its own state comes that one's gradient. Nothing for documents in one slice.

Of a tree (`types.tree`) all of these count unique tokens, and attention's workspace its slices by pieces. Padded packs
count `pad_to` tokens a document. Temporaries are estimates: of a forward one layer's input, norm output, attention
input/output and gated product, or what a scan reads and gives in fp32; of a backward one layer's recomputed activations
and gradients, attention's workspace (`cost.layer_counts`), on the last stage logits and their fp32 softmax and
gradient, min(T, HEAD_ROWS)·vocab, or logits alone, which Liger's kernel turns into their gradient (tp = 1).

Static bytes of a rank: weights e·N, fp32 gradients max(e,4)·N, and AdamW's state sharded over dp·cp: fp32 master
(only where e < 4) and two moments, max(e,4) bytes each. With LoRA adapters only those have gradients and state.
`optimizer.moments = "bfloat16"`: two moments and the master's other half, 2 bytes each. `optimizer.in_backward`:
gradients of the largest unit, and of a tied embedding, to which the head adds first. `optimizer.offload_stages`: no
state on these stages' ranks; the chunks that an update brings are held when activations are not.

A recomputed document keeps a smaller chunk and its backward holds one layer's recomputed tensors; an offloaded one
keeps no chunk but two layers' buffers while a pack runs. Context parallelism (DP-Merge too) divides a pack's tokens
over its ranks: of K and V a rank keeps its share of documents that are never cut and gathers one layer at a time; of
a cut document it keeps all, and all of dK and dV. Where some slices lie whole on one rank (DACP) a pack counts what
the fullest rank holds: exact where packs are freed before the next starts (pp = 1), else an upper bound.

Host memory: a rank holds a forward's offloaded rows from its start until the backward with a chunk's first token ends,
as on the device. They are page-locked and kept within a run (`runtime/replay/host_copies.py`), so a node needs the sum
of its ranks' peaks.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenload.cost.layer_counts import (
    OFFLOAD,
    POLICIES,
    RECOMPUTE,
    REPLAY,
    WorkspaceRates,
    accumulator_bytes,
    activation_bytes_per_token,
    kv_bytes_per_token,
    kv_gradient_bytes_per_token,
    most_of_stage,
    recomputed_width,
    stage_kinds,
    state_bytes,
    state_width,
    workspace_rates,
)
from evenload.types.cluster import ClusterSpec
from evenload.types.columns import SliceColumns, cuts_within
from evenload.types.document import Direction, PackSharding
from evenload.types.layer_kind import LayerKind
from evenload.types.layout import ParallelLayout, even_layout
from evenload.types.model import ModelSpec
from evenload.types.pipeline import ActionColumns, PackBytes, PipelineTasks
from evenload.types.timeline import KINDS, MEMORY_KINDS
from evenload.types.tree_columns import NO_TREES, TreeColumns

HEAD_ROWS = 2048  # Rows of logits the runtime holds at once; bounds the head's memory whatever the pack
WIDENED_ELEMENTS = 2**22  # Of bf16 moments and masters in halves, at once in fp32, while they are updated
OFFLOAD_BUFFERED_LAYERS = 2  # Layers whose offloaded tensors are on the device at once: one in use, one on its way


@dataclass(frozen=True, eq=False)
class ReplicaPacks:
    """Hold the packs of one replica and the documents that they are made of.

    Args:
        num_tokens: int64[n] of the documents that `SliceColumns.doc` counts, without padding.
        policy: int8[n], indices into `cost.layer_counts.POLICIES`; None = all replay.
        owners: int64[num_slices] of forward and backward, the rank that holds a slice whole, -1 = all share it; None =
            all.
        shardings: `MicroPack.sharding` of every forward pack; () = nobody shares any.
        trees: ranges of the documents; ranks share no trees.
    """

    forward: SliceColumns
    backward: SliceColumns
    num_tokens: NDArray[np.int64]
    policy: NDArray[np.int8] | None = None
    owners: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None
    shardings: tuple[PackSharding, ...] = ()
    trees: TreeColumns = NO_TREES

    def pieces(self, direction: Direction) -> SliceColumns:
        """Return the slices of one direction as they are priced: those of trees by pieces."""
        return self.trees.pieces(self.forward if direction == "forward" else self.backward)

    def by_rank(self, cp: int) -> "ReplicaPacks":
        """Return the packs as each of the ranks that own slices sees them, rank after rank, each with packs and
        documents of its own, so that one call prices all; itself where every slice is shared."""
        if self.owners is None:
            return self
        sides = []
        for columns, owner in zip((self.forward, self.backward), self.owners, strict=True):
            rank, piece = np.nonzero((owner == np.arange(cp)[:, None]) | (owner < 0))
            packs = rank * columns.num_packs + columns.pack_of_slice()[piece]
            view = columns.taken(piece, packs, cp * columns.num_packs)
            doc = (view.doc + rank * len(self.num_tokens)).astype(np.int32)
            sides.append(dataclasses.replace(view, doc=doc))
        policy = None if self.policy is None else np.tile(self.policy, cp)
        return ReplicaPacks(sides[0], sides[1], np.tile(self.num_tokens, cp), policy)


def parameters_per_rank(model: ModelSpec, layout: ParallelLayout) -> NDArray[np.int64]:
    """Count the stored parameters of every pipeline rank; int64[R]."""
    return _units_per_rank(model, layout, unit_parameters(model, layout.tp)[0])


def trained_parameters_per_rank(model: ModelSpec, layout: ParallelLayout) -> NDArray[np.int64]:
    """Count the parameters of every pipeline rank that have gradients and optimizer state; int64[R]."""
    return _units_per_rank(model, layout, unit_parameters(model, layout.tp)[1])


def _units_per_rank(model: ModelSpec, layout: ParallelLayout, units: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.array([sum(_held_units(model, layout, rank, units).values()) for rank in layout.leading_ranks], np.int64)


def _held_units(model: ModelSpec, layout: ParallelLayout, rank: int, units: NDArray[np.int64]) -> dict[int, int]:
    """Return those of `units` (`unit_parameters`) that a pipeline rank holds, by number."""
    stages, last = layout.stages_of_rank(rank), layout.num_stages - 1
    result = {1 + layer: int(units[1 + layer]) for one in stages for layer in range(*layout.stage_layers[one])}
    if 0 in stages:
        result[0] = int(units[0])
    if last in stages:
        is_copy = model.tied_embeddings and 0 not in stages  # a tied head on another rank than the embedding
        result[1 + model.num_layers] = int(units[-1] + is_copy * units[0])
    return result


def trained_unit_parameters(model: ModelSpec, layout: ParallelLayout, rank: int) -> dict[int, int]:
    """Count the trained parameters of a pipeline rank by unit: 0 is the embedding, 1 the first layer, and the head
    comes after the last. They add up to the rank's `trained_parameters_per_rank`."""
    held = _held_units(model, layout, rank, unit_parameters(model, layout.tp)[1])
    if model.has_adapters:
        return {unit: size for unit, size in held.items() if size}
    if 0 in held:
        held[0], held[1] = held[0] + model.position_parameters, held[1] - model.position_parameters
    return held


def embedding_parameters(model: ModelSpec, tp: int = 1) -> int:
    """Count the parameters of the embedding, or of the head, on one tensor-parallel rank: rows are split."""
    return -(-model.vocab_size // tp) * model.hidden_size


def layer_parameters(model: ModelSpec, tp: int = 1) -> NDArray[np.int64]:
    """Count the parameters of one layer of every kind on one tensor-parallel rank, int64[K]: matrices are split; norms,
    router, and biases behind a sum over ranks are copies."""
    return np.array([_parameters(kind, tp) for kind in model.kinds], np.int64)


def _parameters(kind: LayerKind, tp: int) -> int:
    split, of_keys = kind.parameters - kind.copied_parameters, 0
    if kind.attention and kind.attention.kv_heads < tp:  # ranks have copies of the matrices of keys and values
        head = kind.products[0].inputs * (kind.attention.head_dim + kind.attention.value_dim)
        split, of_keys = split - head * kind.attention.kv_heads, head * kind.attention.local_kv_heads(tp)
    # Adapters are counted whole on every tensor-parallel rank: they are thin.
    return -(-split // tp) + of_keys + kind.copied_parameters + kind.adapter_parameters


def trained_layer_parameters(model: ModelSpec, tp: int = 1) -> NDArray[np.int64]:
    """Count as `layer_parameters` those that have gradients and optimizer state: all, or the adapters alone."""
    if model.has_adapters:
        return np.array([kind.adapter_parameters for kind in model.kinds], np.int64)
    return layer_parameters(model, tp)


def unit_parameters(model: ModelSpec, tp: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Count the stored and the trained parameters of embedding, every layer, and head with final norm on one
    tensor-parallel rank; int64[layers + 2] each."""
    embedding, layers = embedding_parameters(model, tp), np.array(model.layers)
    head = 0 if model.tied_embeddings else embedding
    stored = np.concatenate([[embedding], layer_parameters(model, tp)[layers], [head + model.norm_parameters]])
    # Learned positions are where the first layer is; a tied embedding's other end has none.
    stored[1] += model.position_parameters
    if not model.has_adapters:
        return stored, stored
    trained = np.zeros_like(stored)
    trained[1:-1] = trained_layer_parameters(model, tp)[layers]
    return stored, trained


def static_bytes(model: ModelSpec, layout: ParallelLayout) -> NDArray[np.int64]:
    """Count the bytes of weights, gradients and optimizer state of every pipeline rank; int64[R]."""
    return static_kinds(model, layout).sum(axis=1)


def static_kinds(model: ModelSpec, layout: ParallelLayout) -> NDArray[np.int64]:
    """Count weights, gradients and optimizer state apart; int64[R, 3]."""
    element, trained = model.bytes_per_element, trained_parameters_per_rank(model, layout)
    state = _state_bytes(model, layout) - offloaded_state_bytes(model, layout)
    if model.unit_gradients:  # with `dp` alone
        units = trained_unit_parameters(model, layout, 0)
        tied = embedding_parameters(model, layout.tp) if model.tied_embeddings else 0
        trained = np.array([tied + max((units | {0: units[0] - tied}).values())])
    return np.stack([element * parameters_per_rank(model, layout), max(element, 4) * trained, state], axis=1)


def _state_bytes(model: ModelSpec, layout: ParallelLayout) -> NDArray[np.int64]:
    trained = trained_parameters_per_rank(model, layout)
    return optimizer_bytes_per_parameter(model) * -(-trained // np.array(layout.data_sizes))


def offloaded_state_bytes(model: ModelSpec, layout: ParallelLayout) -> NDArray[np.int64]:
    """Count the bytes of optimizer state that every pipeline rank keeps in host memory; int64[R]."""
    stages = [layout.stages_of_rank(rank)[0] for rank in range(layout.pipeline_ranks)]
    return _state_bytes(model, layout) * np.isin(stages, model.offloaded_state)


def optimizer_bytes_per_parameter(model: ModelSpec) -> int:
    """Count the bytes of AdamW's state (Muon's is smaller): two moments, a master copy where weights have less than 4
    bytes, and the moving average of the weights, if there is one."""
    element, work = model.bytes_per_element, max(model.bytes_per_element, 4)
    moments, master = (2, 2) if model.bfloat16_moments else (work, 4)
    return 2 * moments + (master if element < 4 else 0) + (work if model.averaged_weights else 0)


def checkpoint_bytes(model: ModelSpec, *, has_muon: bool) -> int:
    """Count the bytes of the trained weights and of their optimizer's state, of Muon's at least."""
    state = optimizer_bytes_per_parameter(model) - has_muon * max(model.bytes_per_element, 4)
    trained = trained_parameters_per_rank(model, even_layout(model.num_layers))
    return int(trained.sum()) * (model.bytes_per_element + state)


def pipeline_bytes(model: ModelSpec, layout: ParallelLayout, packs: ReplicaPacks) -> PackBytes:
    """Count all byte columns of one replica; where ranks own slices, of every pack the most of any rank."""
    held = bytes_at_rates(byte_rates(model, layout), count_tokens(packs.by_rank(layout.cp)))
    if packs.owners is None:
        return held
    fullest = {
        name: getattr(held, name).reshape(layout.cp, -1, layout.num_stages).max(axis=0)
        for name in PackBytes.pack_columns()
    }
    return PackBytes(static_bytes=held.static_bytes, **fullest)


@dataclass(frozen=True, eq=False)
class TokenCounts:
    """Count tokens of packs as one rank sees them, by what is kept of them.

    Args:
        kept_chunks, freed_chunks, computed: int64[m_f or m_b, policies], recorded in a forward, given back and computed
            in a backward.
        kept_kv, freed_kv, opened, closed: int64[m_f or m_b], of documents whose K and V, dK and dV come and go.
        kept_states, freed_states: int64[m_f], int64[m_b], states of documents, not tokens; a forward may take more than
            it leaves.
        gathered_forward, gathered_backward: int64[m_f], int64[m_b], whose K and V other ranks send.
        pieces, prefix_keys, keys: int64[m_b], slices of backward packs (of trees their pieces), keys before them, and
            keys that they see.
    """

    kept_chunks: NDArray[np.int64]
    freed_chunks: NDArray[np.int64]
    kept_kv: NDArray[np.int64]
    freed_kv: NDArray[np.int64]
    opened: NDArray[np.int64]
    closed: NDArray[np.int64]
    kept_states: NDArray[np.int64]
    freed_states: NDArray[np.int64]
    computed: NDArray[np.int64]
    gathered_forward: NDArray[np.int64]
    gathered_backward: NDArray[np.int64]
    pieces: NDArray[np.int64]
    prefix_keys: NDArray[np.int64]
    keys: NDArray[np.int64]


def count_tokens(packs: ReplicaPacks) -> TokenCounts:
    """Count what `bytes_at_rates` multiplies with; every slice counts as shared by its `cp` ranks."""
    forward, backward, policy = packs.forward, packs.backward, packs.policy
    forward_pack, backward_pack = forward.pack_of_slice(), backward.pack_of_slice()
    forward_tokens, backward_tokens = (-(-side.slice_tokens() // side.cp) for side in (forward, backward))
    document_tokens = packs.num_tokens.copy()
    pad_to = forward.pad_to[forward_pack]
    padded = pad_to > 0
    document_tokens[forward.doc[padded]] = pad_to[padded]
    # A document cut in backward has a slice with start > 0.
    last_backward = backward.start == 0
    is_cut = np.zeros(len(document_tokens), bool)
    is_cut[backward.doc[~last_backward]] = True
    cut_tokens = np.where(is_cut[backward.doc], document_tokens[backward.doc], 0)
    kv_tokens = _kv_tokens(forward, document_tokens, is_cut)
    opens = backward.stop == packs.num_tokens[backward.doc]
    goes_on = forward.stop < packs.num_tokens[forward.doc]
    states = cuts_within(forward, backward)[0] + goes_on - (forward.start > 0)
    freeing_pack = packs_of_first_rows(forward, backward)
    pieces = packs.pieces("backward")
    piece_pack = pieces.pack_of_slice()
    m_f, m_b = forward.num_packs, backward.num_packs
    return TokenCounts(
        kept_chunks=_policy_sums(forward_pack, forward_tokens, m_f, forward.doc, policy),
        freed_chunks=_policy_sums(freeing_pack, forward_tokens, m_b, forward.doc, policy),
        kept_kv=_pack_sums(forward_pack, np.where(forward.start == 0, kv_tokens[forward.doc], 0), m_f),
        freed_kv=_pack_sums(backward_pack, np.where(last_backward, kv_tokens[backward.doc], 0), m_b),
        opened=_pack_sums(backward_pack, np.where(opens, cut_tokens, 0), m_b),
        closed=_pack_sums(backward_pack, np.where(last_backward, cut_tokens, 0), m_b),
        kept_states=_pack_sums(forward_pack, states, m_f),
        freed_states=_pack_sums(backward_pack, ~opens, m_b),
        computed=_policy_sums(backward_pack, backward_tokens, m_b, backward.doc, policy),
        gathered_forward=_pack_sums(forward_pack, np.where(forward.cp > 1, forward.slice_tokens(), 0), m_f),
        gathered_backward=_pack_sums(backward_pack, np.where(backward.cp > 1, backward.slice_tokens(), 0), m_b),
        pieces=_pack_sums(piece_pack, np.ones_like(pieces.start), m_b),
        prefix_keys=_pack_sums(piece_pack, pieces.start, m_b),
        keys=_pack_sums(piece_pack, pieces.start + pieces.slice_tokens(), m_b),
    )


def bytes_at_rates(rates: "ByteRates", tokens: TokenCounts) -> PackBytes:
    """Return the byte columns of counted packs: a sum with one term for every rate."""
    logits_rows = np.minimum(tokens.computed.sum(axis=1), HEAD_ROWS)
    gathered = tokens.gathered_forward * rates.gathered_forward, tokens.gathered_backward * rates.gathered_backward
    attention = rates.attention
    workspace = tokens.pieces * attention.piece + tokens.prefix_keys * attention.prefix_key
    workspace += attention.of_grouped_keys(tokens.keys)
    return PackBytes(
        static_bytes=rates.static_bytes,
        forward_kept_bytes=tokens.kept_chunks @ rates.chunk
        + np.outer(tokens.kept_kv, rates.kv)
        + np.outer(tokens.kept_states, rates.state),
        # States that a forward takes are there until it has read them.
        forward_temp_bytes=tokens.kept_chunks @ rates.forward_temp
        + gathered[0][:, None]
        + np.outer(np.maximum(-tokens.kept_states, 0), rates.state),
        backward_freed_bytes=tokens.freed_chunks @ rates.chunk
        + np.outer(tokens.freed_kv, rates.kv)
        + np.outer(tokens.freed_states, rates.state)
        + np.outer(tokens.closed - tokens.opened, rates.kv_gradient),
        backward_temp_bytes=tokens.computed @ rates.backward_temp
        + np.outer(logits_rows, rates.logits_per_row)
        + np.outer(tokens.opened, rates.kv_gradient)
        + (gathered[1] + workspace)[:, None],
    )


@dataclass(frozen=True, eq=False)
class ByteRates:
    """Hold bytes a token, which `pipeline_bytes` and the core multiply counts with.

    Args:
        static_bytes: int64[R].
        chunk, forward_temp, backward_temp: int64[policies, P], of a pack; kv, kv_gradient: int64[P], of a document;
            state: int64[P], a document.
        logits_per_row: int64[P], rows up to `HEAD_ROWS` a pack.
        gathered_forward, gathered_backward: a token whose keys and values other ranks send.
        attention: its workspace in backward; that of rows is in `backward_temp`.
    """

    static_bytes: NDArray[np.int64]
    chunk: NDArray[np.int64]
    forward_temp: NDArray[np.int64]
    backward_temp: NDArray[np.int64]
    kv: NDArray[np.int64]
    kv_gradient: NDArray[np.int64]
    state: NDArray[np.int64]
    logits_per_row: NDArray[np.int64]
    gathered_forward: int
    gathered_backward: int
    attention: WorkspaceRates


def byte_rates(model: ModelSpec, layout: ParallelLayout) -> ByteRates:
    tp, element = layout.tp, model.bytes_per_element
    kinds, again = stage_kinds(model, layout), stage_kinds(model, layout, recomputed=True)
    is_last = np.arange(layout.num_stages) == layout.num_stages - 1
    hidden = -(-model.hidden_size // tp)
    # By policy and stage; the final hidden states of the last stage stay on the device under every policy.
    chunk = np.stack(
        [kinds @ activation_bytes_per_token(model, name, tp) + is_last * element * hidden for name in POLICIES]
    )
    # Recomputed layers keep no products of stored documents; those of one layer at a time are made again.
    again_bytes = element * recomputed_width(model, tp)
    chunk[REPLAY] -= again @ again_bytes
    # Elements a token of one layer: hidden states are whole inside a block (gathered over tp), the rest is split.
    inner = np.array([kind.inner for kind in model.kinds], np.int64)
    states = accumulator_bytes(model) * state_width(model, tp)
    forward = element * (2 * model.hidden_size - (-(2 * model.hidden_size + inner) // tp)) + states
    backward = element * (2 * model.hidden_size - (-(4 * model.hidden_size + 4 * inner) // tp)) + 2 * states
    attention = workspace_rates(model, tp)
    rows = np.ones((len(POLICIES), 1), np.int64)
    forward_temp = rows * most_of_stage(kinds, forward)
    backward_temp = rows * (most_of_stage(kinds, backward) + attention.row)
    backward_temp[RECOMPUTE] += most_of_stage(kinds, again_bytes)
    backward_temp[REPLAY] += most_of_stage(again, again_bytes)
    buffered = _buffered_bytes(model, layout, activation_bytes_per_token(model, "replay", tp))
    forward_temp[OFFLOAD] += buffered
    backward_temp[OFFLOAD] += buffered
    kv, kv_gradient = kv_bytes_per_token(model, tp), kv_gradient_bytes_per_token(model, tp)
    is_fused = model.fused_cross_entropy and tp == 1
    return ByteRates(
        static_bytes=static_bytes(model, layout),
        chunk=chunk,
        forward_temp=forward_temp,
        backward_temp=backward_temp,
        kv=kinds @ kv,
        kv_gradient=kinds @ kv_gradient,
        state=kinds @ state_bytes(model, tp),
        logits_per_row=is_last * -(-model.vocab_size // tp) * (element + (0 if is_fused else 8)),
        gathered_forward=int(kv.max()),
        gathered_backward=int((kv + kv_gradient).max()),
        attention=attention,
    )


def backward_temp_estimate(
    model: ModelSpec, layout: ParallelLayout, pack_tokens: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Estimate the temporaries of backward packs of one whole document each, or of none, which all policies have alike;
    int64[num_packs, P]. `pack_tokens` int64[num_packs] are of one rank, with padding."""
    rates = byte_rates(model, layout)
    workspace = rates.attention.of_grouped_keys(pack_tokens) + (pack_tokens > 0) * rates.attention.piece
    return (
        np.outer(pack_tokens, rates.backward_temp[REPLAY])
        + np.outer(np.minimum(pack_tokens, HEAD_ROWS), rates.logits_per_row)
        + workspace[:, None]
    )


def _kv_tokens(
    forward: SliceColumns, document_tokens: NDArray[np.int64], is_cut: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """Count the tokens of every document whose K and V a rank keeps: all of a cut document, whose later slices read the
    gathered prefix, else its share."""
    ranks_of_document = np.ones(len(document_tokens), np.int64)
    ranks_of_document[forward.doc] = forward.cp
    whole = is_cut.copy()
    whole[forward.doc[forward.start > 0]] = True
    return np.where(whole, document_tokens, -(-document_tokens // ranks_of_document))


def _policy_sums(
    pack: NDArray[np.int64],
    tokens: NDArray[np.int64],
    num_packs: int,
    doc: NDArray[np.int32],
    policy: NDArray[np.int8] | None,
) -> NDArray[np.int64]:
    """Count the tokens of every pack by activation policy; int64[num_packs, number of policies]."""
    if policy is None:
        sums = np.zeros((num_packs, len(POLICIES)), np.int64)
        sums[:, REPLAY] = _pack_sums(pack, tokens, num_packs)
        return sums
    key = pack * len(POLICIES) + policy[doc]
    return _pack_sums(key, tokens, num_packs * len(POLICIES)).reshape(num_packs, len(POLICIES))


def _pack_sums(pack: NDArray[np.int64], values: NDArray[np.int64], num_packs: int) -> NDArray[np.int64]:
    return np.bincount(pack, weights=values, minlength=num_packs).astype(np.int64)


def packs_of_first_rows(slices: SliceColumns, others: SliceColumns) -> NDArray[np.int64]:
    """Find, among the packs of the other direction, the one with each slice's first row; int64[num_slices]."""
    span = 1 + max(int(slices.stop.max(initial=0)), int(others.stop.max(initial=0)))
    keys, wanted = (side.doc.astype(np.int64) * span + side.start for side in (others, slices))
    order = np.argsort(keys, kind="stable")
    return others.pack_of_slice()[order[np.searchsorted(keys[order], wanted, side="right") - 1]]


def bytes_by_kind(model: ModelSpec, layout: ParallelLayout, tasks: PipelineTasks, packs: ReplicaPacks) -> PipelineTasks:
    """Return priced tasks with an axis of kinds at the end of every column of bytes, K = len(MEMORY_KINDS):
    `held.static_bytes` int64[R, K], the others, those of `split` too, int64[packs, P, K]. Kinds add up to the bytes."""
    views = 1 if packs.owners is None else layout.cp
    columns = {
        name: np.zeros((views, *getattr(tasks.held, name).shape, len(MEMORY_KINDS)), np.int64)
        for name in PackBytes.pack_columns()
    }
    counts = count_tokens(packs.by_rank(layout.cp))
    for kind, of_kind in _rates_by_kind(byte_rates(model, layout)).items():
        held = bytes_at_rates(of_kind, counts)
        for field, column in columns.items():
            column[..., MEMORY_KINDS.index(kind)] = getattr(held, field).reshape(column.shape[:-1])
    static = np.zeros((layout.pipeline_ranks, len(MEMORY_KINDS)), np.int64)
    at = [MEMORY_KINDS.index(kind) for kind in ("weights", "gradients", "optimizer_state")]
    static[:, at] = static_kinds(model, layout)
    held = {name: _fullest(rows) for name, rows in columns.items()}
    return _with_bytes(tasks, PackBytes(static_bytes=static, **held))


def _buffered_bytes(model: ModelSpec, layout: ParallelLayout, of_kinds: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return, of layers' bytes by kind (int64[K]), the most of neighbouring layers of every stage whose tensors are on
    the device at once; int64[P]."""
    of_layers = np.concatenate([[0], np.cumsum(of_kinds[list(model.layers)])])
    runs = [(first, stop, min(stop - first, OFFLOAD_BUFFERED_LAYERS)) for first, stop in layout.stage_layers]
    return np.array(
        [(of_layers[first + n : stop + 1] - of_layers[first : stop + 1 - n]).max() for first, stop, n in runs]
    )


def _rates_by_kind(rates: ByteRates) -> dict[str, ByteRates]:
    """Return the rates of every kind that packs hold, all others at zero; they add up to `rates` (without static
    bytes)."""
    zeros: dict[str, Any] = {name: 0 * rate for name, rate in vars(rates).items() if name != "attention"}
    zeros["attention"] = WorkspaceRates()

    def only(**kept: Any) -> ByteRates:
        return ByteRates(**(zeros | kept))

    def row(values: NDArray[np.int64], policy: int) -> NDArray[np.int64]:
        return np.where(np.arange(len(POLICIES))[:, None] == policy, values, 0)

    # Every policy has the layer buffers of replay; what it has beyond them is its own.
    forward, backward = (np.zeros_like(temp) + temp[REPLAY] for temp in (rates.forward_temp, rates.backward_temp))
    forward_extra, backward_extra = rates.forward_temp - forward, rates.backward_temp - backward
    return {
        **{f"activations_{name}": only(chunk=row(rates.chunk, code)) for code, name in enumerate(POLICIES)},
        "keys_and_values": only(kv=rates.kv),
        "key_value_gradients": only(kv_gradient=rates.kv_gradient),
        "states": only(state=rates.state),
        "gathered_keys_and_values": only(
            gathered_forward=rates.gathered_forward, gathered_backward=rates.gathered_backward
        ),
        "recompute_buffers": only(
            forward_temp=row(forward_extra, RECOMPUTE), backward_temp=row(backward_extra, RECOMPUTE)
        ),
        "offload_buffers": only(forward_temp=row(forward_extra, OFFLOAD), backward_temp=row(backward_extra, OFFLOAD)),
        "layer_buffers": only(forward_temp=forward, backward_temp=backward, attention=rates.attention),
        "head_logits": only(logits_per_row=rates.logits_per_row),
    }


def _fullest(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Take, of [ranks, packs, P, K], what the rank holds that holds most, pack by pack; of equals the first."""
    if len(rows) == 1:
        return rows[0]
    rank = rows.sum(axis=3).argmax(axis=0)
    return np.take_along_axis(rows, rank[None, :, :, None], axis=0)[0]


def _with_bytes(tasks: PipelineTasks, held: PackBytes) -> PipelineTasks:
    if tasks.split is None:
        return dataclasses.replace(tasks, held=held)

    def left(num_bytes: NDArray[np.int64]) -> NDArray[np.int64]:
        out = np.zeros((*num_bytes.shape, len(MEMORY_KINDS)), np.int64)
        out[:, :, MEMORY_KINDS.index("weight_gradient_inputs")] = num_bytes
        return out

    for_weights = tasks.split.weight_freed_bytes
    split = dataclasses.replace(
        tasks.split,
        input_freed_bytes=held.backward_freed_bytes - left(for_weights),
        input_temp_bytes=held.backward_temp_bytes + left(tasks.split.input_temp_bytes - tasks.held.backward_temp_bytes),
        weight_freed_bytes=left(for_weights),
    )
    return dataclasses.replace(tasks, held=held, split=split)


OFFLOAD_SHARE = 0.85  # Of a node's memory, for offloaded activations


@dataclass(frozen=True)
class HostMemory:
    """Hold what a node of so many devices offers to offloaded activations; `limit_bytes` None = not limited."""

    devices_per_node: int
    limit_bytes: int | None

    @property
    def twin_bytes(self) -> int | None:
        """What twins of layers may take beside them: half of the rest, as processes need memory, too."""
        return None if self.limit_bytes is None else int(self.limit_bytes * (1 / OFFLOAD_SHARE - 1) / 2)


Unlimited = Literal["unlimited"]
"""In place of a `HostMemory` where nothing limits offloaded activations, or nothing is offloaded: a name, so that no
limit is forgotten."""


def host_memory(cluster: ClusterSpec) -> HostMemory:
    """Return what nodes of a cluster offer to offloaded activations."""
    return host_memory_of_node(cluster.devices_per_node, cluster.host_memory_bytes)


def host_memory_of_node(devices_per_node: int, memory_bytes: int | None) -> HostMemory:
    """Return what a node with so much memory offers; None = not known, so not limited."""
    return HostMemory(devices_per_node, None if memory_bytes is None else int(OFFLOAD_SHARE * memory_bytes))


class PacksInHostMemory(NamedTuple):
    """Hold what the packs of one replica offload when a forward starts, and give back when a backward ends, or its I
    where it is split; int64[num_packs, P] each."""

    kept: NDArray[np.int64]
    freed: NDArray[np.int64]

    def peaks(self, actions: ActionColumns) -> NDArray[np.int64]:
        """Return the most that every pipeline rank holds at any time where packs run in this order; int64[R]."""
        kept, freed = np.zeros((2, len(actions.kind)), np.int64)
        for kind, into, of_packs in (("F", kept, self.kept), ("B", freed, self.freed), ("I", freed, self.freed)):
            at = np.flatnonzero(actions.kind == KINDS.index(kind))
            into[at] = of_packs[actions.pack[at], actions.stage[at]]
        peaks = np.zeros(actions.num_ranks, np.int64)
        for rank in range(actions.num_ranks):
            own = actions.of_rank(rank)
            running = np.cumsum(kept[own] - freed[own]) + freed[own]
            peaks[rank] = running.max(initial=0)
        return peaks


def host_bytes_of_packs(model: ModelSpec, layout: ParallelLayout, packs: ReplicaPacks) -> PacksInHostMemory | None:
    """Count the offloaded bytes of packs; None where no document is offloaded."""
    if packs.policy is None or not (packs.policy == OFFLOAD).any():
        return None
    counts = count_tokens(packs)
    rate = stage_kinds(model, layout) @ activation_bytes_per_token(model, "replay", layout.tp)
    kept, freed = (np.outer(tokens[:, OFFLOAD], rate) for tokens in (counts.kept_chunks, counts.freed_chunks))
    return PacksInHostMemory(kept, freed)


def peak_host_bytes(
    model: ModelSpec, layout: ParallelLayout, packs: ReplicaPacks, actions: ActionColumns
) -> NDArray[np.int64]:
    """Return the most that every pipeline rank of one replica has offloaded at any time; int64[R]."""
    held = host_bytes_of_packs(model, layout, packs)
    return np.zeros(actions.num_ranks, np.int64) if held is None else held.peaks(actions)


def fullest_node_bytes(layout: ParallelLayout, peaks: Sequence[NDArray[np.int64]], devices_per_node: int) -> int:
    """Return the bytes of the node whose ranks hold most; `peaks` int64[R] of every replica, of one of its context and
    tensor ranks, which hold alike."""
    of_devices = np.repeat(np.stack(peaks, axis=1).ravel(), layout.cp * layout.tp)
    padded = np.zeros(-(-len(of_devices) // devices_per_node) * devices_per_node, np.int64)
    padded[: len(of_devices)] = of_devices
    return int(padded.reshape(-1, devices_per_node).sum(axis=1).max())
