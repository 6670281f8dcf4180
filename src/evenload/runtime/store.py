"""`ActivationStore`: what a stage keeps between a slice's forward and its backward.

Recorded tensors of a forward pack live in *blocks*. A pack whose backward pack has the very same
slices is one block, so recording and reading copy nothing; any other pack is one block per slice, so
that a block is freed as soon as its document's backward has passed it, whatever the cuts are. Keys and
values are one buffer per document, because a later slice reads the whole prefix.

Every byte held is counted by kind where it is allocated and freed; the peaks are what the plan's memory
prediction is tested against (cost/memory.py mirrors these rules).
"""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

Range = tuple[int, int, int]
"""(doc_id, start, stop): tokens of one document, half-open."""
StoreKind = Literal["activations", "keys_and_values", "key_value_gradients"]
"""What the store holds: recorded tensors, keys and values of documents, and their gradients under way."""


def num_rows(ranges: Sequence[Range]) -> int:
    """Tokens in all ranges."""
    return sum(stop - start for _, start, stop in ranges)


@dataclass(eq=False)
class _Block:
    """Recorded tensors of the rows of `ranges`, freed when the last of them is done."""

    ranges: tuple[Range, ...]
    tensors: dict[Hashable, Tensor] = field(default_factory=dict)
    open_ranges: int = 0
    num_bytes: int = 0


@dataclass(eq=False)
class _DocumentBuffers:
    """Keys and values of a document and, while a cut backward is under way, their gradients."""

    num_tokens: int
    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)
    key_grads: dict[int, Tensor] = field(default_factory=dict)
    value_grads: dict[int, Tensor] = field(default_factory=dict)
    num_bytes: dict[StoreKind, int] = field(default_factory=lambda: {"keys_and_values": 0, "key_value_gradients": 0})


class ActivationStore:
    """Activations of one stage during one step.

    Args:
        num_tokens: tokens of every document the replica trains (padded length where it is padded).
        whole_packs: slice lists of backward packs; a forward pack with such a list is kept uncut.
    """

    def __init__(self, num_tokens: dict[int, int], whole_packs: Sequence[tuple[Range, ...]]) -> None:
        self._num_tokens = num_tokens
        self._whole_packs = set(whole_packs)
        self._blocks: dict[int, list[tuple[Range, int, _Block]]] = defaultdict(list)
        self._buffers: dict[int, _DocumentBuffers] = {}
        self._open: list[_Block] = []
        self.held_bytes = 0
        self.peak_bytes = 0
        self.held_by_kind: dict[StoreKind, int] = {"activations": 0, "keys_and_values": 0, "key_value_gradients": 0}
        self.peak_by_kind = dict(self.held_by_kind)

    # ---- forward -------------------------------------------------------------------------------

    def open_pack(self, ranges: tuple[Range, ...]) -> None:
        """Start recording a forward pack."""
        groups = [ranges] if ranges in self._whole_packs else [(r,) for r in ranges]
        self._open = [_Block(ranges=group, open_ranges=len(group)) for group in groups]
        for block in self._open:
            row = 0
            for r in block.ranges:
                self._blocks[r[0]].append((r, row, block))
                row += r[2] - r[1]

    def record(self, key: Hashable, rows: Tensor) -> None:
        """Keep `rows` [T, ...] of the open pack under `key`. The caller must not change it afterwards."""
        if len(self._open) == 1:
            self._keep(self._open[0], key, rows)
            return
        row = 0
        for block in self._open:
            stop = row + num_rows(block.ranges)
            # A copy, so that freeing one document's block frees its bytes, not only a view of the pack.
            self._keep(block, key, rows[row:stop].clone())
            row = stop

    def _keep(self, block: _Block, key: Hashable, rows: Tensor) -> None:
        block.tensors[key] = rows
        block.num_bytes += rows.nbytes
        self._count("activations", rows.nbytes)

    def record_keys(self, doc_id: int, layer: int, start: int, keys: Tensor, values: Tensor) -> None:
        """Keep K and V [n, G, D] of a document's tokens from `start` on; its buffers are made at its first slice."""
        buffers = self._buffers.setdefault(doc_id, _DocumentBuffers(self._num_tokens[doc_id]))
        if layer not in buffers.keys:
            buffers.keys[layer], buffers.values[layer] = (
                like.new_empty(buffers.num_tokens, *like.shape[1:]) for like in (keys, values)
            )
            num_bytes = buffers.keys[layer].nbytes + buffers.values[layer].nbytes
            self._count_document(buffers, "keys_and_values", num_bytes)
        stop = start + keys.shape[0]
        buffers.keys[layer][start:stop], buffers.values[layer][start:stop] = keys, values

    def keys_and_values(self, doc_id: int, layer: int, first: int, stop: int) -> tuple[Tensor, Tensor]:
        """K and V of a document's tokens `[first, stop)`, [stop - first, G, D] each."""
        buffers = self._buffers[doc_id]
        return buffers.keys[layer][first:stop], buffers.values[layer][first:stop]

    # ---- backward ------------------------------------------------------------------------------

    def read(self, key: Hashable, ranges: tuple[Range, ...]) -> Tensor:
        """Rows [T, ...] recorded under `key` for other ranges than they were recorded in."""
        for _, _, block in self._blocks[ranges[0][0]]:
            if block.ranges == ranges:
                return block.tensors[key]
        parts = []
        for doc_id, start, stop in ranges:
            for (_, lo, hi), row, block in self._blocks[doc_id]:
                if lo < stop and start < hi:
                    a, b = max(lo, start) - lo + row, min(hi, stop) - lo + row
                    parts.append(block.tensors[key][a:b])
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def add_key_grads(
        self, doc_id: int, layer: int, first: int, grad_k: Tensor, grad_v: Tensor, start: int, stop: int
    ) -> tuple[Tensor, Tensor]:
        """Add a range's gradients of K and V `[first, stop)` and return the now final ones of `[start, stop)`.

        Ranges of a document come last-first, so nothing after `start` will be added to again. A document
        whose backward is one range needs no accumulator.
        """
        buffers = self._buffers[doc_id]
        if start == 0 and stop == buffers.num_tokens:
            return grad_k, grad_v
        if layer not in buffers.key_grads:
            shape = (buffers.num_tokens, *grad_k.shape[1:])
            # fp32 whatever the compute precision: 32 slices in a bf16 accumulator double the error of dK.
            buffers.key_grads[layer], buffers.value_grads[layer] = (grad_k.new_zeros(shape) for _ in range(2))
            self._count_document(buffers, "key_value_gradients", 2 * buffers.key_grads[layer].nbytes)
        all_k, all_v = buffers.key_grads[layer], buffers.value_grads[layer]
        all_k[first:stop] += grad_k
        all_v[first:stop] += grad_v
        return all_k[start:stop], all_v[start:stop]

    def close_backward(self, ranges: tuple[Range, ...]) -> None:
        """Free what no later backward range needs."""
        for doc_id, start, _ in ranges:
            kept = []
            for entry in self._blocks[doc_id]:
                (_, lo, _), _, block = entry
                if lo < start:
                    kept.append(entry)
                    continue
                block.open_ranges -= 1
                if not block.open_ranges:
                    block.tensors.clear()
                    self._count("activations", -block.num_bytes)
            self._blocks[doc_id] = kept
            if start == 0:
                for kind, num_bytes in self._buffers.pop(doc_id).num_bytes.items():
                    self._count(kind, -num_bytes)
                del self._blocks[doc_id]

    def check_empty(self) -> None:
        """After a step nothing may be left: a leak here is a plan that does not cover its documents."""
        left = sorted({doc_id for doc_id, entries in self._blocks.items() if entries} | set(self._buffers))
        assert not left, f"documents {left} are not finished"
        assert self.held_bytes == 0, f"{self.held_bytes} bytes are counted as held by no document"

    def _count_document(self, buffers: _DocumentBuffers, kind: StoreKind, num_bytes: int) -> None:
        buffers.num_bytes[kind] += num_bytes
        self._count(kind, num_bytes)

    def _count(self, kind: StoreKind, num_bytes: int) -> None:
        self.held_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        self.held_by_kind[kind] += num_bytes
        self.peak_by_kind[kind] = max(self.peak_by_kind[kind], self.held_by_kind[kind])
