"""`bytes_by_kind`: priced packs whose bytes are told apart by kind of memory; the kinds add up to them exactly.

`cost.memory.bytes_at_rates` is a sum with a term a rate, so a kind's bytes are what it gives with all other rates at 0.
Thus a kind can neither be forgotten nor counted differently from the totals that planners use. Kinds are
`types.timeline.MEMORY_KINDS`; their columns have one more axis, K = len(MEMORY_KINDS).

What an I leaves for its W (`cost.split_backward`) is the kind "weight_gradient_inputs". Where ranks of a group hold
different documents (DACP), a pack's kinds are those of its fullest rank, as its total is.

Price: about that of `pipeline_bytes`, and a dozen small products; 1 ms for a replica of 500 documents.
"""

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenload.cost.activation import OFFLOAD, POLICIES, RECOMPUTE, REPLAY
from evenload.cost.attention_workspace import WorkspaceRates
from evenload.cost.memory import (
    ByteRates,
    byte_rates,
    bytes_at_rates,
    count_tokens,
    static_kinds,
)
from evenload.cost.owned_bytes import rank_view
from evenload.types.columns import SliceColumns
from evenload.types.layout import ParallelLayout
from evenload.types.model import ModelSpec
from evenload.types.pipeline import PackBytes, PipelineTasks
from evenload.types.timeline import MEMORY_KINDS

_WEIGHT_INPUTS = MEMORY_KINDS.index("weight_gradient_inputs")


def bytes_by_kind(
    model: ModelSpec,
    layout: ParallelLayout,
    tasks: PipelineTasks,
    forward: SliceColumns,
    backward: SliceColumns,
    num_tokens: NDArray[np.int64],
    policy: NDArray[np.int8] | None = None,
    owners: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None,
) -> PipelineTasks:
    """The same tasks with an axis of kinds at the end of every column of bytes: `held.static_bytes` int64[R, K], the
    others, those of `split` too, int64[packs, P, K].

    Args:
        tasks: the packs as priced; of their bytes only what I leaves for W is taken from there.
        forward, backward: the same packs.
        num_tokens: int64[num_documents] of the replica's documents, without padding.
        policy: int8[num_documents]; None = all replay.
        owners: int64[num_slices] forward and backward, the rank that holds a slice, -1 = all ranks; None = all shared.
    """
    if owners is None:
        views = [(forward, backward)]
    else:
        views = [
            (rank_view(forward, owners[0], rank), rank_view(backward, owners[1], rank)) for rank in range(layout.cp)
        ]
    rates = rates_by_kind(byte_rates(model, layout))
    columns = {}
    for name in PackBytes.pack_columns():
        columns[name] = np.zeros((len(views), *getattr(tasks.held, name).shape, len(MEMORY_KINDS)), np.int64)
    for rank, view in enumerate(views):
        counts = count_tokens(*view, num_tokens, policy)
        for kind, of_kind in rates.items():
            held = bytes_at_rates(of_kind, counts)
            for field, column in columns.items():
                column[rank, :, :, MEMORY_KINDS.index(kind)] = getattr(held, field)
    static = np.zeros((layout.pipeline_ranks, len(MEMORY_KINDS)), np.int64)
    at = [MEMORY_KINDS.index(kind) for kind in ("weights", "gradients", "optimizer_state")]
    static[:, at] = static_kinds(model, layout)
    held = {name: _fullest(rows) for name, rows in columns.items()}
    return _with_bytes(tasks, PackBytes(static_bytes=static, **held))


def rates_by_kind(rates: ByteRates) -> dict[str, ByteRates]:
    """Rates of every kind that packs hold, all others at zero; they add up to `rates` (without static bytes)."""
    zeros: dict[str, Any] = {
        field.name: 0 * getattr(rates, field.name)
        for field in dataclasses.fields(ByteRates)
        if field.name != "attention"
    }
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
    """[ranks, packs, P, K] of the rank that holds most, pack by pack; of equals the first."""
    if len(rows) == 1:
        return rows[0]
    rank = rows.sum(axis=3).argmax(axis=0)
    return np.take_along_axis(rows, rank[None, :, :, None], axis=0)[0]


def _with_bytes(tasks: PipelineTasks, held: PackBytes) -> PipelineTasks:
    """Bytes of I and W are the whole backward's, and what I leaves for W as a kind of its own."""
    if tasks.split is None:
        return dataclasses.replace(tasks, held=held)

    def left(num_bytes: NDArray[np.int64]) -> NDArray[np.int64]:
        out = np.zeros((*num_bytes.shape, len(MEMORY_KINDS)), np.int64)
        out[:, :, _WEIGHT_INPUTS] = num_bytes
        return out

    for_weights = tasks.split.weight_freed_bytes
    split = dataclasses.replace(
        tasks.split,
        input_freed_bytes=held.backward_freed_bytes - left(for_weights),
        input_temp_bytes=held.backward_temp_bytes + left(tasks.split.input_temp_bytes - tasks.held.backward_temp_bytes),
        weight_freed_bytes=left(for_weights),
    )
    return dataclasses.replace(tasks, held=held, split=split)
