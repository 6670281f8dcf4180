"""`ActivationStore` keeps the activations of a stage from a slice's forward to its backward.

Tensors of a forward pack are kept in *blocks* (`BlockIndex`): runs of slices with one activation policy whose first
tokens come back in one backward pack, so that they are freed together. A pack that is one block is kept uncut, so
recording and reading copy nothing. The keys and values of a document that is cut in forward are one buffer. Policies:

    replay     keep everything that is recorded
    recompute  keep all but the products of linear layers (layers that a stage recomputes do so for all documents)
    offload    keep everything but final hidden states in host memory: a layer's tensors are copied out while the next
               layer runs, and in backward come back one layer before their use (`ReturningRows`), so at most two
               layers of a pack's offloaded documents are on the device

Bytes are counted by kind where they are allocated and freed; `cost/memory.py` predicts the peaks by the same rules.
"""

import itertools
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from evenload.attention.range_attention import work_dtype
from evenload.runtime.comm.tensor_group import RowShard
from evenload.runtime.replay.document_states import DocumentStates
from evenload.runtime.replay.held_bytes import HeldBytes, StoreKind, own_memory
from evenload.runtime.replay.host_copies import HostCopies, HostRows, Wait, host_copies
from evenload.runtime.replay.weight_products import WeightProducts
from evenload.types.document import ActivationPolicy, Range
from evenload.types.tree import RowRun

_ACTIVATIONS: dict[ActivationPolicy, StoreKind] = {
    "replay": "activations_replay",
    "recompute": "activations_recompute",
    "offload": "activations_offload",
}


@dataclass(eq=False)
class StoredBlock:
    """Holds the recorded tensors of the rows of `ranges`; freed when the last of them is done.

    Args:
        rows, own_rows: places in the forward pack, of all rows and of those of this tensor-parallel rank.
        host: offloaded tensors by layer; leaving: those of the layer that is being recorded.
    """

    ranges: tuple[Range, ...]
    policy: ActivationPolicy
    rows: slice
    own_rows: slice
    open_ranges: int
    tensors: dict[Hashable, Tensor] = field(default_factory=dict)
    host: dict[int, dict[Hashable, HostRows]] = field(default_factory=dict)
    leaving: dict[Hashable, Tensor] = field(default_factory=dict)


class Part(NamedTuple):
    """Names rows of a block, among all its rows and among its own rows."""

    block: StoredBlock
    rows: slice
    own_rows: slice

    def num_rows(self, *, own: bool) -> int:
        rows = self.own_rows if own else self.rows
        return rows.stop - rows.start

    def of(self, tensor: Tensor, *, own: bool) -> Tensor:
        """Return these rows of a tensor of the block; the tensor itself where they are all."""
        return tensor if self.num_rows(own=own) == tensor.shape[0] else tensor[self.own_rows if own else self.rows]


class _Place(NamedTuple):
    range: Range
    row: int
    own_row: int
    block: StoredBlock


class BlockIndex:
    """Finds the blocks of one stage during one step; ranges that are in no backward pack are blocks of their own."""

    def __init__(
        self,
        backward_packs: Sequence[tuple[Range, ...]],
        policy: Callable[[int], ActivationPolicy],
        shard: RowShard | None,
    ) -> None:
        self._policy, self._shard = policy, shard
        self._places: dict[int, list[_Place]] = defaultdict(list)
        # By identity, as the hash of many ranges takes longer than a layer's launches.
        self._parts: dict[int, tuple[tuple[Range, ...], list[Part]]] = {}
        backward: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for pack, ranges in enumerate(backward_packs):
            for doc_id, start, _ in ranges:
                backward[doc_id].append((start, pack))
        self._backward = {doc_id: sorted(starts) for doc_id, starts in backward.items()}

    def open_pack(self, ranges: tuple[Range, ...]) -> list[StoredBlock]:
        self._parts.clear()
        blocks: list[StoredBlock] = []
        kind = None
        row = own_row = 0
        for r in ranges:
            policy = self._policy(r[0])
            before, kind = kind, (policy, self._freed_by(r[0], r[1]))
            if kind != before or kind[1] is None:
                blocks.append(StoredBlock((), policy, slice(row, row), slice(own_row, own_row), 0))
            block = blocks[-1]
            place = _Place(r, row - block.rows.start, own_row - block.own_rows.start, block)
            self._places[r[0]].append(place)
            row += r[2] - r[1]
            own_row += r[2] - r[1] if self._shard is None else self._shard.num_rows((r,))
            block.ranges += (r,)
            block.open_ranges += 1
            block.rows, block.own_rows = slice(block.rows.start, row), slice(block.own_rows.start, own_row)
        return blocks

    def parts(self, ranges: tuple[Range, ...]) -> list[Part]:
        """Return where ranges were recorded, in row order; neighbours in a block are one part."""
        if id(ranges) not in self._parts:
            parts: list[Part] = []
            for part in (part for r in ranges for part in self._parts_of(r)):
                last = parts[-1] if parts else None
                if last is not None and last.block is part.block and last.rows.stop == part.rows.start:
                    rows, own = slice(last.rows.start, part.rows.stop), slice(last.own_rows.start, part.own_rows.stop)
                    parts[-1] = Part(part.block, rows, own)
                else:
                    parts.append(part)
            self._parts[id(ranges)] = ranges, parts
        return self._parts[id(ranges)][1]

    def close(self, ranges: Iterable[Range]) -> list[StoredBlock]:
        """End the backward of these ranges; return the blocks that no later one needs."""
        self._parts.clear()
        done = []
        for doc_id, start, _ in ranges:
            kept = []
            for place in self._places[doc_id]:
                if place.range[1] < start:
                    kept.append(place)
                    continue
                place.block.open_ranges -= 1
                if not place.block.open_ranges:
                    done.append(place.block)
            self._places[doc_id] = kept
            if start == 0:
                del self._places[doc_id]
        return done

    def unfinished(self) -> set[int]:
        return {doc_id for doc_id, places in self._places.items() if places}

    def _freed_by(self, doc_id: int, token: int) -> int | None:
        """Return the backward pack with a slice's first token."""
        starts = self._backward.get(doc_id, ())
        at = bisect_right(starts, token, key=lambda entry: entry[0])
        return starts[at - 1][1] if at else None

    def _parts_of(self, wanted: Range) -> Iterable[Part]:
        doc_id, start, stop = wanted
        for (_, lo, hi), row, own_row, block in self._places[doc_id]:
            if lo < stop and start < hi:
                first, last = max(lo, start), min(hi, stop)
                rows = slice(first - lo + row, last - lo + row)
                if self._shard is None:
                    yield Part(block, rows, rows)
                    continue
                own = (own_row + self._shard.num_rows((Range(doc_id, lo, at),)) for at in (first, last))
                yield Part(block, rows, slice(*own))


class ReturningRows:
    """Fetches the offloaded rows of some ranges, layer by layer in the order in which layers will be entered. Of
    `own_rows_keys` a tensor-parallel rank has own rows only."""

    def __init__(
        self,
        ranges: tuple[Range, ...],
        layers: Sequence[int],
        index: BlockIndex,
        own_rows_keys: Collection[Hashable],
        copies: HostCopies,
        device: torch.device,
        held: HeldBytes,
    ) -> None:
        self.ranges = ranges
        self._known = frozenset(ranges)
        self._order = deque(layers)
        self._index, self._own_rows_keys = index, own_rows_keys
        self._copies, self._device, self._held = copies, device, held
        self._fetched: dict[int, dict[Hashable, tuple[Tensor, Wait]]] = {}  # by layer and key
        self._start_next()

    def __contains__(self, r: Range) -> bool:
        return r in self._known

    def enter(self, layer: int) -> None:
        for _, wait in self._fetched[layer].values():
            wait()
        self._start_next()

    def leave(self, layer: int) -> None:
        self._held.count("offload_buffers", -sum(rows.nbytes for rows, _ in self._fetched.pop(layer).values()))

    def find(self, key: Hashable) -> Tensor | None:
        """Return all rows that were recorded under a key; None where none of its layers is fetched."""
        return next((layer[key][0] for layer in self._fetched.values() if key in layer), None)

    def _start_next(self) -> None:
        if not self._order:
            return
        number = self._order.popleft()
        pieces: dict[Hashable, list[Tensor]] = defaultdict(list)
        for part in self._index.parts(self.ranges):
            for key, host in part.block.host[number].items():
                pieces[key] += host.rows(part.own_rows if key in self._own_rows_keys else part.rows)
        layer = {key: self._copies.to_device(parts, self._device) for key, parts in pieces.items()}
        self._fetched[number] = layer
        self._held.count("offload_buffers", sum(rows.nbytes for rows, _ in layer.values()))


Site = tuple[int, str]  # a product's layer, and its module in the layer
CallKey = int | tuple[int, int]  # of a layer's attention: the layer; of its later calls (layer, 1), (layer, 2), ...
KeysAndValues = tuple[Tensor, Tensor]  # or their gradients, [tokens, G, Dk] and [tokens, G, Dv]


def call_key(layer: int, n: int) -> CallKey:
    """Name the call of a layer's attention that follows n others."""
    return (layer, n) if n else layer


def layer_of(key: CallKey) -> int:
    return key if isinstance(key, int) else key[0]


def num_rows(ranges: Iterable[Range | RowRun]) -> int:
    return sum(one.stop - one.start for one in ranges)


def _num_bytes(layers: Mapping[CallKey, KeysAndValues]) -> int:
    return sum(keys.nbytes + values.nbytes for keys, values in layers.values())


class KeyRows(NamedTuple):
    """Names rows of keys and values, which lie by call of attention in one tensor each."""

    layers: dict[CallKey, KeysAndValues]
    start: int
    stop: int

    def of(self, key: CallKey) -> KeysAndValues:
        """Return K and V of a call, [stop - start, G, Dk] and [stop - start, G, Dv]."""
        keys, values = self.layers[key]
        if self.stop - self.start == keys.shape[0]:
            return keys, values
        return keys[self.start : self.stop], values[self.start : self.stop]

    def part(self, first: int, stop: int) -> "KeyRows":
        return KeyRows(self.layers, self.start + first, self.start + stop)


class ActivationStore:
    """Keeps the activations of one stage during one step.

    Args:
        num_tokens: stored tokens of every document of the replica, padding included.
        backward_packs: their ranges, by which slices of a forward pack are kept together.
        policies: of documents that do not use `replay`.
        recomputed_layers: whose products no document keeps; then no document has a policy of its own.
        held: where bytes are counted; the stages of a rank share one.
        copies: to and from the host; None = made at the first offloaded tensor.
    """

    def __init__(
        self,
        num_tokens: dict[int, int],
        backward_packs: Sequence[tuple[Range, ...]],
        *,
        policies: Mapping[int, ActivationPolicy] | None = None,
        recomputed_layers: Collection[int] = (),
        held: HeldBytes | None = None,
        copies: HostCopies | None = None,
        shard: RowShard | None = None,
    ) -> None:
        self._own_rows_keys: set[Hashable] = set()
        self._num_tokens, self._policies, self._recomputed_layers = num_tokens, policies or {}, recomputed_layers
        self._index = BlockIndex(backward_packs, self.policy, shard)
        self._copies = copies
        self._device: torch.device | None = None
        # By document; those of neighbouring whole documents of a block, which are freed together, lie in one tensor.
        self._keys: dict[int, KeyRows] = {}
        # By document and call, while a cut backward is under way.
        self._key_grads: dict[int, dict[CallKey, KeysAndValues]] = defaultdict(dict)
        # Of the forward pack whose rows are recorded; runs are of neighbouring whole documents (the first stands for
        # all), or one slice, with their rows.
        self._open_blocks: list[StoredBlock] = []
        self._open_runs: list[tuple[Range, slice, ActivationPolicy]] = []
        self._leaving: deque[tuple[list[Wait], int]] = deque()
        self._returning: ReturningRows | None = None
        self._weight_products: dict[Hashable, WeightProducts] = {}
        self.held = HeldBytes() if held is None else held
        self.states = DocumentStates(num_tokens, backward_packs, self.held)

    def policy(self, doc_id: int) -> ActivationPolicy:
        return self._policies.get(doc_id, "replay")

    def recomputes(self, site: Site) -> bool:
        return site[0] in self._recomputed_layers

    # ---- forward -------------------------------------------------------------------------------

    def open_pack(self, ranges: tuple[Range, ...]) -> None:
        self._open_blocks, self._open_runs = self._index.open_pack(ranges), []

    def record_product(self, site: Site, rows: Tensor, *, is_own_rows: bool = False) -> None:
        """Keep the output of a linear layer, or of experts, where backward does not recompute it; see `record`."""
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
        """Keep `rows` [T, ...] (own rows of a tensor-parallel rank: [n, ...]) of the open pack under `key`; the caller
        must not change them afterwards. Recomputed documents do not keep products."""
        if is_own_rows:
            self._own_rows_keys.add(key)
        is_whole = len(self._open_blocks) == 1
        for block in self._open_blocks:
            own = rows if is_whole else rows[block.own_rows if is_own_rows else block.rows]
            if block.policy == "recompute" and is_product:
                continue
            if block.policy == "offload" and not stays_on_device:
                block.leaving[key] = own
                self.held.count("offload_buffers", own.nbytes)
                continue
            # A copy, so that freeing one document's block frees its bytes, not only a view of the pack.
            block.tensors[key] = own if is_whole else own.clone()
            self.held.count(_ACTIVATIONS[block.policy], own.nbytes)

    def end_layer(self, layer: int) -> None:
        """End a layer of the open pack: its offloaded tensors are copied out while the next layer runs."""
        waits, num_bytes = [], 0
        for block in self._open_blocks:
            for key, rows in block.leaving.items():
                self._device = rows.device
                if self._copies is None:
                    self._copies = host_copies(rows.device)
                host, wait = self._copies.to_host(rows)
                block.host.setdefault(layer, {})[key] = host
                waits.append(wait)
                num_bytes += rows.nbytes
            block.leaving.clear()
        if not waits:
            return
        self.held.count_host(num_bytes)
        self._leaving.append((waits, num_bytes))
        if len(self._leaving) > 1:
            self._await_oldest()

    def close_pack(self) -> None:
        while self._leaving:
            self._await_oldest()

    def _await_oldest(self) -> None:
        waits, num_bytes = self._leaving.popleft()
        self.held.count("offload_buffers", -num_bytes)
        for wait in waits:
            wait()

    def record_pack_keys(self, key: CallKey, keys: Tensor, values: Tensor) -> None:
        """Keep K and V [T, G, Dk] and [T, G, Dv] of all slices of the open pack, of which no other rank has rows."""
        if not self._open_runs:
            self._open_runs = [run for block in self._open_blocks for run in self._runs(block)]
        for r, rows, policy in self._open_runs:
            if not self.is_whole(r):
                self.record_keys(r.doc_id, key, r.start, keys[rows], values[rows])
                continue
            # Values may be a view of rows that are recorded too, and offloaded ones leave the device.
            keep = torch.clone if policy == "offload" else own_memory
            kept = self._keys[r.doc_id].layers[key] = keep(keys[rows]), keep(values[rows])
            self.held.count("keys_and_values", kept[0].nbytes + kept[1].nbytes)

    def _runs(self, block: StoredBlock) -> Iterator[tuple[Range, slice, ActivationPolicy]]:
        stop = block.rows.start
        for is_whole, run in itertools.groupby(block.ranges, self.is_whole):
            ranges, first, layers = list(run), stop, {}
            for r in ranges:
                start, stop = stop, stop + r.stop - r.start
                if is_whole:
                    self._keys[r.doc_id] = KeyRows(layers, start - first, stop - first)
                else:
                    yield r, slice(start, stop), block.policy
            if is_whole:
                yield ranges[0], slice(first, stop), block.policy

    def is_whole(self, r: Range) -> bool:
        return r[1] == 0 and r[2] == self._num_tokens[r[0]]

    def record_keys(self, doc_id: int, key: CallKey, start: int, keys: Tensor, values: Tensor) -> None:
        """Keep K and V of a document's n tokens from `start` on; its buffers are made at its first slice."""
        kept = self.document_keys(doc_id).layers
        if key not in kept:
            all_k, all_v = (like.new_empty(self._num_tokens[doc_id], *like.shape[1:]) for like in (keys, values))
            kept[key] = all_k, all_v
            self.held.count("keys_and_values", all_k.nbytes + all_v.nbytes)
        for buffer, rows in zip(kept[key], (keys, values), strict=True):
            buffer[start : start + rows.shape[0]] = rows

    def document_keys(self, doc_id: int) -> KeyRows:
        """Return where K and V of a document lie, before its first slice is recorded, too."""
        if doc_id not in self._keys:
            self._keys[doc_id] = KeyRows({}, 0, self._num_tokens[doc_id])
        return self._keys[doc_id]

    def keys_and_values(self, doc_id: int, key: CallKey, first: int, stop: int) -> KeysAndValues:
        """Return K and V of a document's tokens `[first, stop)`."""
        return self._keys[doc_id].part(first, stop).of(key)

    # ---- backward ------------------------------------------------------------------------------

    def open_backward(self, ranges: tuple[Range, ...], layers: Sequence[int]) -> None:
        """Start to fetch the offloaded tensors of a backward pack's first layer; `layers` in the order in which they
        will be entered. A second call before `close_backward` does nothing."""
        offloaded = tuple(r for r in ranges if self.policy(r[0]) == "offload")
        if not offloaded or self._returning is not None:
            return
        assert self._device is not None, "rows to fetch were copied out from some device"
        assert self._copies is not None
        where = self._copies, self._device, self.held
        self._returning = ReturningRows(offloaded, layers, self._index, self._own_rows_keys, *where)

    def enter_layer(self, layer: int) -> None:
        if self._returning is not None:
            self._returning.enter(layer)

    def leave_layer(self, layer: int) -> None:
        if self._returning is not None:
            self._returning.leave(layer)

    def read(self, key: Hashable, ranges: tuple[Range, ...]) -> Tensor:
        """Return the rows [T, ...] that were recorded under `key`, of any ranges. A row is read back by one backward
        pack, which may overwrite it once it needs it no more."""
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
        self, doc_id: int, key: CallKey, first: int, grad_k: Tensor, grad_v: Tensor, start: int, stop: int
    ) -> KeysAndValues:
        """Add a range's gradients of K and V `[first, stop)`; return the now final ones of `[start, stop)`, as ranges
        of a document come last-first. A document whose backward is one range needs no accumulator."""
        num_tokens, grads = self._num_tokens[doc_id], self._key_grads[doc_id]
        if start == 0 and stop == num_tokens and key not in grads:
            return grad_k, grad_v
        if key not in grads:
            # fp32 whatever the compute precision: 32 slices in a bf16 accumulator double the error of dK.
            all_k, all_v = (
                one.new_zeros((num_tokens, *one.shape[1:]), dtype=work_dtype(one)) for one in (grad_k, grad_v)
            )
            grads[key] = all_k, all_v
            self.held.count("key_value_gradients", all_k.nbytes + all_v.nbytes)
        all_k, all_v = grads[key]
        all_k[first:stop] += grad_k
        all_v[first:stop] += grad_v
        return all_k[start:stop], all_v[start:stop]

    def defer_weights(self, pack: Hashable) -> WeightProducts:
        products = self._weight_products[pack] = WeightProducts(self.held)
        return products

    def add_deferred_weights(self, pack: Hashable) -> None:
        self._weight_products.pop(pack).add_all()

    def close_backward(self, ranges: tuple[Range, ...]) -> None:
        """Free what no later backward range needs."""
        self._returning = None
        for block in self._index.close(ranges):
            self.held.count(_ACTIVATIONS[block.policy], -sum(rows.nbytes for rows in block.tensors.values()))
            block.tensors.clear()
            self._free_host(block)
        ended = [doc_id for doc_id, start, _ in ranges if start == 0]
        self._free_keys(ended)
        for doc_id in ended:
            self.held.count("key_value_gradients", -_num_bytes(self._key_grads.pop(doc_id, {})))

    def _free_keys(self, documents: Iterable[int]) -> None:
        """Free K and V of documents, of neighbours that lie in one tensor all at once."""
        lying = [kept.layers for doc_id in documents if (kept := self._keys.pop(doc_id, None)) is not None]
        for layers in {id(layers): layers for layers in lying}.values():
            self.held.count("keys_and_values", -_num_bytes(layers))
            layers.clear()  # the pack that names its rows may live on

    def _free_host(self, block: StoredBlock) -> None:
        """Free a block's host memory; every copy from it has been queued, as all packs that read it are over."""
        for layer in block.host.values():
            assert self._copies is not None, "rows are in host memory"
            for rows in layer.values():
                self._copies.arena.free(rows)
                self.held.count_host(-sum(piece.nbytes for piece in rows.pieces))
        block.host.clear()

    def check_empty(self) -> None:
        """Assert that nothing is left after a step: a leak is a plan that does not cover its documents."""
        left = sorted(self._index.unfinished() | set(self._keys) | set(self._key_grads) | self.states.unfinished())
        assert not left, f"documents {left} are not finished"
        assert not self._weight_products, f"weight gradients of packs {list(self._weight_products)} are not added"


class ForwardStore(ActivationStore):
    """Keeps keys and values of one stage during one step's forwards, of documents that have not ended."""

    def open_pack(self, ranges: tuple[Range, ...]) -> None:
        rows = slice(0, num_rows(ranges))
        self._open_blocks, self._open_runs = [StoredBlock(ranges, "replay", rows, rows, len(ranges))], []

    def record(self, key: Hashable, rows: Tensor, **options: bool) -> None:
        """Keep nothing: there is no backward."""

    def end_documents(self, documents: Iterable[int]) -> None:
        """Free documents whose last rows have run."""
        self._free_keys(documents)
