"""`ActivationStore`: what a stage keeps between a slice's forward and its backward.

Recorded tensors of a forward pack live in *blocks* (`blocks.py`): slices that are freed at the same moment. A pack
that is one block is kept uncut, so recording and reading copy nothing. Keys and values of a document that is cut in
forward are one buffer, because a later slice reads the whole prefix; those of the other documents of a block are one
tensor a layer. (Values may be a view of a recorded product: then they are held once and counted twice.)

What a block keeps depends on the activation policy of its document (`cost/layer_counts.py`):

    replay     everything that is recorded
    recompute  all but the products of linear layers, which the backward makes again; so do recomputed layers of a
               stage for all documents
    offload    everything, in host memory: when a layer of a forward pack ends its tensors are copied out while the
               next layer runs; in the backward pack they come back, one layer ahead of their use. So at most two
               layers of a pack's offloaded documents are on the device. Final hidden states stay there

Every byte held is counted by kind where it is allocated and freed; the peaks are what the plan's memory
prediction is tested against (cost/memory.py mirrors these rules).
"""

import itertools
from collections import defaultdict, deque
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from evenload.attention.range_attention import work_dtype
from evenload.runtime.comm.tensor_group import RowShard
from evenload.runtime.replay.blocks import BlockIndex, StoredBlock
from evenload.runtime.replay.held_bytes import HeldBytes, StoreKind, own_memory
from evenload.runtime.replay.host_copies import Copy, HostCopies, host_copies
from evenload.runtime.replay.returning_rows import ReturningRows
from evenload.runtime.replay.weight_products import WeightProducts
from evenload.types.micropack import ActivationPolicy
from evenload.types.token_range import Range

Site = tuple[int, str]
"""Of a product: its layer, and the name of its module in it."""
_NO_POLICIES: Mapping[int, ActivationPolicy] = {}


def num_rows(ranges: Iterable[Range]) -> int:
    return sum(stop - start for _, start, stop in ranges)


@dataclass(eq=False)
class _DocumentBuffers:
    """Keys and values of a document by layer and, while a cut backward is under way, their gradients."""

    num_tokens: int
    kept: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    grads: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    num_bytes: dict[StoreKind, int] = field(default_factory=lambda: {"keys_and_values": 0, "key_value_gradients": 0})


class ActivationStore:
    """Activations of one stage during one step.

    Args:
        num_tokens: tokens of every document the replica trains (padded length where it is padded).
        backward_packs: their ranges, by which slices of a forward pack are kept together.
        policies: of documents that do not use `replay`.
        recomputed_layers: whose products no document keeps; then no document has a policy of its own.
        held: where bytes are counted; the stages of a rank share one.
        shard: of a tensor-parallel rank, which rows it has of what is recorded as own rows.
        copies: to and from the host; made for the device at the first offloaded tensor where it is not given.
    """

    def __init__(
        self,
        num_tokens: dict[int, int],
        backward_packs: Sequence[tuple[Range, ...]],
        *,
        policies: Mapping[int, ActivationPolicy] = _NO_POLICIES,
        recomputed_layers: Collection[int] = (),
        held: HeldBytes | None = None,
        copies: HostCopies | None = None,
        shard: RowShard | None = None,
    ) -> None:
        self._own_rows_keys: set[Hashable] = set()
        self._num_tokens = num_tokens
        self._policies = policies
        self._recomputed_layers = recomputed_layers
        self._index = BlockIndex(backward_packs, self.policy, shard)
        self._copies = copies
        self._device: torch.device | None = None
        self._buffers: dict[int, _DocumentBuffers] = {}
        self.open_blocks: list[StoredBlock] = []
        """Of the forward pack whose rows are recorded."""
        self._leaving: deque[tuple[list[Copy], int]] = deque()
        self._returning: ReturningRows | None = None
        self._weight_products: dict[Hashable, WeightProducts] = {}
        self.held = HeldBytes() if held is None else held

    def policy(self, doc_id: int) -> ActivationPolicy:
        return self._policies.get(doc_id, "replay")

    def recomputes(self, site: Site) -> bool:
        """Whether no document keeps the products of a site."""
        return site[0] in self._recomputed_layers

    # ---- forward -------------------------------------------------------------------------------

    def open_pack(self, ranges: tuple[Range, ...]) -> None:
        """Record a forward pack from now on."""
        self.open_blocks = self._index.open_pack(ranges)

    def record_product(self, site: Site, rows: Tensor, *, is_own_rows: bool = False) -> None:
        """Keep the output of a linear layer, or of experts, where it is not made again; see `record`."""
        if not self.recomputes(site):
            self.record(site, rows, is_product=True, is_own_rows=is_own_rows)

    def record(
        self,
        key: Hashable,
        rows: Tensor,
        *,
        is_product: bool = False,
        is_own_rows: bool = False,
        stays_on_device: bool = False,
    ) -> None:
        """Keep `rows` [T, ...] of the open pack under `key`. The caller must not change it afterwards.

        Args:
            is_product: of a linear layer, which recomputed documents do not keep.
            is_own_rows: a tensor-parallel rank has own rows only, [n, ...].
            stays_on_device: under every policy.
        """
        if is_own_rows:
            self._own_rows_keys.add(key)
        for block in self.open_blocks:
            own = rows if len(self.open_blocks) == 1 else rows[block.own_rows if is_own_rows else block.rows]
            if block.policy == "recompute" and is_product:
                continue
            if block.policy == "offload" and not stays_on_device:
                block.leaving[key] = own
                self.held.count("offload_buffers", own.nbytes)
                continue
            # A copy, so that freeing one document's block frees its bytes, not only a view of the pack.
            block.tensors[key] = own if len(self.open_blocks) == 1 else own.clone()
            block.num_bytes += own.nbytes
            self.held.count(_ACTIVATIONS[block.policy], own.nbytes)

    def end_layer(self, layer: int) -> None:
        """A layer of the open pack is recorded: its offloaded tensors leave while the next layer runs."""
        copies, num_bytes = [], 0
        for block in self.open_blocks:
            for key, rows in block.leaving.items():
                self._device = rows.device
                if self._copies is None:
                    self._copies = host_copies(rows.device)
                host, copy = self._copies.to_host(rows)
                block.host.setdefault(layer, {})[key] = host
                copies.append(copy)
                block.num_host_bytes += rows.nbytes
                num_bytes += rows.nbytes
            block.leaving.clear()
        if not copies:
            return
        self.held.count_host(num_bytes)
        self._leaving.append((copies, num_bytes))
        if len(self._leaving) > 1:
            for copy in self._oldest_leaving():
                copy.wait()

    def close_pack(self) -> None:
        while self._leaving:
            for copy in self._oldest_leaving():
                copy.release()

    def _oldest_leaving(self) -> list[Copy]:
        copies, num_bytes = self._leaving.popleft()
        self.held.count("offload_buffers", -num_bytes)
        return copies

    def record_pack_keys(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Keep K and V [T, G, D] of all slices of the open pack, of which no other rank has rows. The caller must not
        change them afterwards."""
        for block in self.open_blocks:
            row = block.rows.start
            for is_whole, run in itertools.groupby(block.ranges, self.is_whole):
                ranges = tuple(run)
                stop = row + num_rows(ranges)
                if is_whole:
                    # Values may be a view of rows that are recorded too, and offloaded ones leave the device.
                    keep = torch.clone if block.policy == "offload" else own_memory
                    self._record_whole(layer, ranges, keep(keys[row:stop]), keep(values[row:stop]))
                    row = stop
                    continue
                for doc_id, start, end in ranges:
                    rows = slice(row, row + end - start)
                    self.record_keys(doc_id, layer, start, keys[rows], values[rows])
                    row = rows.stop

    def is_whole(self, r: Range) -> bool:
        """A range is all of its document."""
        return r[1] == 0 and r[2] == self._num_tokens[r[0]]

    def _record_whole(self, layer: int, ranges: tuple[Range, ...], keys: Tensor, values: Tensor) -> None:
        """K and V of neighbouring whole documents of a block, which are freed at the same moment: one tensor each."""
        sizes = [stop for _, _, stop in ranges]
        for (doc_id, _, _), own_k, own_v in zip(ranges, keys.split(sizes), values.split(sizes), strict=True):
            buffers = self._buffers_of(doc_id)
            buffers.kept[layer] = own_k, own_v
            buffers.num_bytes["keys_and_values"] += own_k.nbytes + own_v.nbytes
        self.held.count("keys_and_values", keys.nbytes + values.nbytes)

    def _buffers_of(self, doc_id: int) -> _DocumentBuffers:
        if doc_id not in self._buffers:
            self._buffers[doc_id] = _DocumentBuffers(self._num_tokens[doc_id])
        return self._buffers[doc_id]

    def record_keys(self, doc_id: int, layer: int, start: int, keys: Tensor, values: Tensor) -> None:
        """Keep K and V [n, G, D] of a document's tokens from `start` on; its buffers are made at its first slice."""
        buffers = self._buffers_of(doc_id)
        if layer not in buffers.kept:
            all_k, all_v = (like.new_empty(buffers.num_tokens, *like.shape[1:]) for like in (keys, values))
            buffers.kept[layer] = all_k, all_v
            self._count_document(buffers, "keys_and_values", all_k.nbytes + all_v.nbytes)
        for kept, rows in zip(buffers.kept[layer], (keys, values), strict=True):
            kept[start : start + rows.shape[0]] = rows

    def keys_and_values(self, doc_id: int, layer: int, first: int, stop: int) -> tuple[Tensor, Tensor]:
        """K and V of a document's tokens `[first, stop)`, [stop - first, G, D] each."""
        keys, values = self._buffers[doc_id].kept[layer]
        if first == 0 and stop == keys.shape[0]:
            return keys, values
        return keys[first:stop], values[first:stop]

    # ---- backward ------------------------------------------------------------------------------

    def open_backward(self, ranges: tuple[Range, ...], layers: Sequence[int]) -> None:
        """Announce a backward pack, so that offloaded tensors of its first layer start to come back; layers in the
        order in which they will be entered. May be called ahead of it; a second call does nothing."""
        offloaded = tuple(r for r in ranges if self.policy(r[0]) == "offload")
        if not offloaded or self._returning is not None:
            return
        assert self._device is not None, "rows to fetch were sent away from some device"
        assert self._copies is not None
        self._returning = ReturningRows(
            offloaded, layers, self._index, self._own_rows_keys, self._copies, self._device, self.held
        )

    def enter_layer(self, layer: int) -> None:
        """Have the offloaded tensors of a layer of the running backward on the device, and those of its next layer on
        their way."""
        if self._returning is not None:
            self._returning.enter(layer)

    def leave_layer(self, layer: int) -> None:
        if self._returning is not None:
            self._returning.leave(layer)

    def read(self, key: Hashable, ranges: tuple[Range, ...]) -> Tensor:
        """Rows [T, ...] recorded under `key` for other ranges than they were recorded in."""
        own = key in self._own_rows_keys
        back = self._returning
        fetched = None if back is None or not any(r in back for r in ranges) else back.find(key)
        if back is None or fetched is None:
            parts = [part.of(part.block.tensors[key], own=own) for part in self._index.parts(ranges)]
        elif ranges == back.ranges:
            parts = [fetched]
        else:
            parts, row = [], 0
            for r in ranges:
                here = self._index.parts((r,))
                if r not in back:
                    parts += [part.of(part.block.tensors[key], own=own) for part in here]
                    continue
                stop = row + sum(part.num_rows(own=own) for part in here)
                parts.append(fetched[row:stop])
                row = stop
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def add_key_grads(
        self,
        doc_id: int,
        layer: int,
        first: int,
        grad_k: Tensor,
        grad_v: Tensor,
        start: int,
        stop: int,
    ) -> tuple[Tensor, Tensor]:
        """Add a range's gradients of K and V `[first, stop)`, and return the now final ones of `[start, stop)`.

        Ranges of a document come last-first, so nothing after `start` will be added to again. A document
        whose backward is one range needs no accumulator.
        """
        buffers = self._buffers[doc_id]
        if start == 0 and stop == buffers.num_tokens and layer not in buffers.grads:
            return grad_k, grad_v
        if layer not in buffers.grads:
            shape = (buffers.num_tokens, *buffers.kept[layer][0].shape[1:])
            # fp32 whatever the compute precision: 32 slices in a bf16 accumulator double the error of dK.
            work = work_dtype(grad_k)
            buffers.grads[layer] = grad_k.new_zeros(shape, dtype=work), grad_k.new_zeros(shape, dtype=work)
            self._count_document(buffers, "key_value_gradients", 2 * buffers.grads[layer][0].nbytes)
        all_k, all_v = buffers.grads[layer]
        all_k[first:stop] += grad_k
        all_v[first:stop] += grad_v
        return all_k[start:stop], all_v[start:stop]

    def defer_weights(self, pack: Hashable) -> WeightProducts:
        """Where the weight gradients of a backward pack wait until `add_deferred_weights`."""
        products = self._weight_products[pack] = WeightProducts(self.held)
        return products

    def add_deferred_weights(self, pack: Hashable) -> None:
        """Add the weight gradients that a backward pack has deferred, and free what they needed."""
        self._weight_products.pop(pack).add_all()

    def close_backward(self, ranges: tuple[Range, ...]) -> None:
        """Free what no later backward range needs."""
        self._returning = None
        for block in self._index.close(ranges):
            block.tensors.clear()
            self.held.count(_ACTIVATIONS[block.policy], -block.num_bytes)
            self._free_host(block)
        freed: dict[StoreKind, int] = defaultdict(int)
        for doc_id, start, _ in ranges:
            if start == 0:
                for kind, num_bytes in self._buffers.pop(doc_id).num_bytes.items():
                    freed[kind] += num_bytes
        for kind, num_bytes in freed.items():
            self.held.count(kind, -num_bytes)

    def _free_host(self, block: StoredBlock) -> None:
        """All packs that read any of its rows are over, so the last copy of each has been asked for."""
        for layer in block.host.values():
            assert self._copies is not None, "rows are in host memory"
            for rows in layer.values():
                self._copies.free(rows)
        block.host.clear()
        self.held.count_host(-block.num_host_bytes)

    def check_empty(self) -> None:
        """After a step nothing may be left: a leak here is a plan that does not cover its documents."""
        left = sorted(self._index.unfinished() | set(self._buffers))
        assert not left, f"documents {left} are not finished"
        assert not self._weight_products, f"weight gradients of packs {list(self._weight_products)} are not added"

    def _count_document(self, buffers: _DocumentBuffers, kind: StoreKind, num_bytes: int) -> None:
        buffers.num_bytes[kind] += num_bytes
        self.held.count(kind, num_bytes)


_ACTIVATIONS: dict[ActivationPolicy, StoreKind] = {
    "replay": "activations_replay",
    "recompute": "activations_recompute",
    "offload": "activations_offload",
}
