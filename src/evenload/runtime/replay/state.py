"""`ReplayState` describes the running pass of a stage to the replaced modules of its layers."""

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenload.attention.range_attention import RangeAttention, work_dtype
from evenload.runtime.comm.collectives import RankGroup
from evenload.runtime.comm.tensor_group import RowExchange, RowShard, TensorGroup
from evenload.runtime.device import to_device
from evenload.runtime.model.state_calls import StateCall
from evenload.runtime.replay.context_attention import LocalAttention, PackAttention
from evenload.runtime.replay.shared_states import SharedStates
from evenload.runtime.replay.store import ActivationStore, CallKey, call_key, num_rows
from evenload.runtime.replay.weight_products import WeightProducts, known_output
from evenload.types.document import Direction, Range


@dataclass(eq=False)
class RouterBalance:
    """Computes Switch Transformer's load-balancing loss over one stage's layers (Fedus et al. 2021, eq. 4-6).

    For document d of n_d tokens on layer l, f = share of its tokens that chose expert e (k chosen, so the shares add
    up to k), P = mean probability of e over its tokens, both over whole documents without padding:

        loss = coefficient · Σ_d (n_d / N) · mean over the model's layers l of  E · Σ_e f·P

    with N the tokens of the global batch. f is a count and has no gradient. A document's counts are complete before its
    first backward slice, so the gradient is exact under every plan (docs/decisions/15). Ranks that share a document sum
    its counts after each of its forward packs, once for all `layers` of a stage; `num_layers` is of the model. So do
    the ranks of a `tensor`-parallel group, each of which counts own rows, and adds their part to the loss.
    """

    coefficient: float
    num_layers: int
    num_experts: int
    layers: tuple[int, ...]
    tensor: TensorGroup | None = None
    num_tokens: Mapping[int, int] = field(default_factory=dict)
    _chosen: dict[tuple[int, int], Any] = field(default_factory=lambda: defaultdict(int))
    _of_pack: dict[tuple[int, int], Any] = field(default_factory=lambda: defaultdict(int))
    _loss: float | Tensor = 0.0

    def begin_step(self, num_tokens: Mapping[int, int]) -> None:
        self.num_tokens = num_tokens
        self._chosen.clear()
        self._of_pack.clear()
        self._loss = 0.0

    def count(self, layer: int, ranges: Sequence[Range], chosen: Tensor) -> None:
        """Count the experts [T, k] that tokens of the running forward pack chose."""
        for (doc_id, _, _), rows in self._real_rows(ranges):
            self._of_pack[layer, doc_id] += count_values(chosen[rows].flatten(), self.num_experts)

    def end_pack(self, ranges: Sequence[Range], shared: PackAttention | None, device: torch.device) -> None:
        """End a forward pack after its last layer. Collective over the ranks that have rows of it."""
        if self.tensor is not None:
            self._sum_counts(self.tensor, [doc_id for doc_id, _, _ in ranges], self._of_pack, device)
        if shared is not None:
            self._sum_counts(shared.group, shared.documents, self._chosen, device)
        for key, counts in self._of_pack.items():
            self._chosen[key] += counts
        self._of_pack.clear()

    def _sum_counts(
        self, group: RankGroup, documents: Sequence[int], totals: dict[tuple[int, int], Any], device: torch.device
    ) -> None:
        """Move the pack's counts of documents to `totals`, summed over a group."""
        keys = [(layer, doc_id) for layer in self.layers for doc_id in dict.fromkeys(documents)]
        if not keys:
            return
        nothing = torch.zeros(self.num_experts, dtype=torch.int64, device=device)
        mine = torch.stack([self._of_pack.pop(key, nothing) for key in keys])
        everyone = group.all_gather(mine, "counts of experts").wait()
        for key, counts in zip(keys, everyone.view(group.size, *mine.shape).sum(0), strict=True):
            totals[key] += counts

    def _real_rows(self, ranges: Sequence[Range]) -> Iterator[tuple[Range, slice]]:
        """Yield ranges with those of this rank's rows of a pack that hold their tokens and no padding."""
        shard, row = self.tensor.shard if self.tensor is not None else RowShard(0, 1), 0
        for doc_id, start, stop in ranges:
            real = Range(doc_id, start, max(start, min(stop, self.num_tokens[doc_id])))
            yield Range(doc_id, start, stop), slice(row, row + shard.num_rows((real,)))
            row += shard.num_rows((Range(doc_id, start, stop),))

    def add_to(self, layer: int, ranges: Sequence[Range], logits: Tensor) -> Tensor:
        """Return a backward pack's logits [T, E] such that autograd adds the loss's gradient; add to the loss."""
        work = work_dtype(logits)
        weights = torch.zeros(logits.shape, dtype=work, device=logits.device)
        scale = self.coefficient * logits.shape[1] / (self.num_layers * sum(self.num_tokens.values()))
        for (doc_id, _, _), rows in self._real_rows(ranges):
            weights[rows] = self._chosen[layer, doc_id].to(work) * (scale / self.num_tokens[doc_id])
        with torch.no_grad():
            probabilities = logits.to(work).softmax(-1)
            loss = (weights * probabilities).sum(-1, keepdim=True)
            # d/dlogit of Σ w·p, softmax differentiated by hand.
            extra = (probabilities * (weights - loss)).to(logits.dtype)
            self._loss = self._loss + loss.sum().double()
        return known_output(logits.detach(), lambda grad: grad + extra, logits)

    def take_loss(self) -> Tensor:
        loss, self._loss = torch.as_tensor(self._loss, dtype=torch.float64), 0.0
        return loss


def count_values(values: Tensor, size: int) -> Tensor:
    """Count each of 0..size-1, int64[size], as `bincount`, for which the host would wait for a GPU."""
    return values.new_zeros(size).scatter_add_(0, values, torch.ones_like(values))


class GatherOnce:
    """Gathers own rows; products that share them (q, k and v; gate and up) follow each other and share the result."""

    def __init__(self, rows: RowExchange) -> None:
        self._rows = rows
        self._last: tuple[object, Tensor] | None = None

    def __call__(self, own: Tensor, key: object) -> Tensor:
        """Gather rows that `key` names. The tensor cannot name them: where a rank has no rows, all its tensors are
        alike, and it would leave out transfers that the others make."""
        if self._last is None or self._last[0] is not key:
            self._last = key, self._rows.gather(own)
        return self._last[1]


class BlockInput:
    """Gathers the input of a block of a tensor-parallel layer, chunk by chunk.

    Attributes:
        own: rows of this rank, [n, hidden]; `key` names them (`GatherOnce`).
        rows: those of all ranks, [T, hidden], which `arrive` fills.
        weight_gradients: calls that add the weight gradients of the linears that read the input.
    """

    def __init__(self, own: Tensor, rows: RowExchange) -> None:
        self.own, self.key = own, object()
        self.rows = own.new_empty((rows.num_rows, *own.shape[1:]))
        self.weight_gradients: list[Callable[[], None]] = []
        self._transfers = deque((chunk.rows, chunk.exchange.start_gather(own[chunk.own])) for chunk in rows.chunks)

    def arrive(self) -> Iterator[slice]:
        """Wait for the remaining chunks one by one; yield the rows of each."""
        while self._transfers:
            chunk, fill = self._transfers.popleft()
            fill(self.rows[chunk])
            yield chunk

    def whole(self) -> Tensor:
        for _ in self.arrive():
            pass
        return self.rows

    @property
    def is_complete(self) -> bool:
        return not self._transfers


@dataclass(eq=False)
class TensorRows:
    """Describes the running pack's rows on a tensor-parallel group; `block` runs now, `again` gathers rows in W."""

    rows: RowExchange
    ranges: tuple[Range, ...]
    block: BlockInput = field(init=False)
    again: GatherOnce = field(init=False)
    _recomputed: tuple[RowExchange, Tensor, Tensor] | None = None

    def __post_init__(self) -> None:
        self.again = GatherOnce(self.rows)

    def recomputed(self, store: ActivationStore) -> tuple[RowExchange, Tensor, Tensor]:
        """Return the exchange of rows whose products are recomputed, and which of own rows are these, and are not."""
        if self._recomputed is None:
            self._recomputed = self.rows.divide(_is_recomputed(store, self.ranges))
        return self._recomputed


def _is_recomputed(store: ActivationStore, ranges: tuple[Range, ...]) -> NDArray[np.bool_]:
    """Return bool[T]: whether the products of each row's document are recomputed."""
    again = [store.policy(doc_id) == "recompute" for doc_id, _, _ in ranges]
    return np.repeat(np.array(again, bool), [stop - start for _, start, stop in ranges])


@dataclass(eq=False)
class ReplayState:
    """Describes the running pass; shared by the replaced modules of one stage.

    Args:
        direction: of the running pack.
        ranges: of the running pack, in row order; attention: of the rows that no other rank has.
        store: set only while a pass runs; so are tensor_rows, with tensor parallelism.
        tensor: the group of the tensor parallelism; None = there is none.
        recomputed: int64[n], rows of the running backward pack whose products are recomputed; None = no rows. `kept`
            are the other rows, of `kept_ranges`.
        products: where weight gradients of the running backward pack wait; None = they are added at once.
        shared: attention of the running pack where other ranks have rows of it too; None = this rank has them all.
        shared_states: then states of the pack's documents.
        layer: that runs (`enter_layer`), which has called its attention `num_calls` times, and functions that carry a
            state `num_states` times.
    """

    backend: RangeAttention
    direction: Direction = "forward"
    ranges: tuple[Range, ...] = ()
    attention: LocalAttention = field(default_factory=LocalAttention)
    store: ActivationStore = field(init=False)
    recomputed: Tensor | None = None
    kept: Tensor | None = None
    kept_ranges: tuple[Range, ...] = ()
    products: WeightProducts | None = None
    balance: RouterBalance | None = None
    shared: PackAttention | None = None
    shared_states: SharedStates | None = None
    tensor: TensorGroup | None = None
    tensor_rows: TensorRows = field(init=False)
    layer: int = -1
    num_calls: int = 0
    num_states: int = 0

    def enter_layer(self, layer: int) -> None:
        """Begin a layer's forward, of either direction."""
        self.layer, self.num_calls, self.num_states = layer, 0, 0

    def next_call(self) -> CallKey:
        """Return the store's key of the next call of attention in the running layer."""
        self.num_calls += 1
        return call_key(self.layer, self.num_calls - 1)

    def carry(self, call: StateCall) -> Tensor:
        """Answer the running layer's next call of a function that carries a state."""
        self.num_states += 1
        key, states, shared = (self.layer, self.num_states - 1), self.store.states, self.shared_states
        if shared is None:
            compute = states.forward if self.direction == "forward" else states.backward
            return compute(key, call, self.ranges)
        exchange = shared.forward if self.direction == "forward" else shared.backward
        return exchange(states, key, call, self.ranges)

    @property
    def num_rows(self) -> int:
        return num_rows(self.ranges)

    @property
    def num_own_rows(self) -> int:
        return self.num_rows if self.tensor is None else self.tensor_rows.rows.num_own

    def recomputes(self, site: tuple[int, str]) -> bool:
        return self.recomputed is not None or self.store.recomputes(site)

    def divide_rows(self, device: torch.device) -> None:
        """Find the rows of the running pack whose products are not stored."""
        self.recomputed, self.kept, self.kept_ranges = None, None, ()
        if self.direction == "forward":
            return
        is_recomputed = _is_recomputed(self.store, self.ranges)
        if not is_recomputed.any():
            return
        self.recomputed = to_device(torch.from_numpy(np.flatnonzero(is_recomputed)), device)
        if not is_recomputed.all():
            self.kept = to_device(torch.from_numpy(np.flatnonzero(~is_recomputed)), device)
            self.kept_ranges = tuple(r for r in self.ranges if self.store.policy(r[0]) != "recompute")

    def read_or_recompute(
        self, site: tuple[int, str], make: Callable[[Tensor], Tensor], input: Tensor, *, is_own_rows: bool = False
    ) -> Tensor:
        """Return the product [T, out] of `input` [T, in] at a site of the backward pack; `make` computes it. Own rows
        are those that this rank of a tensor-parallel group has between blocks."""
        recomputes = self.store.recomputes(site)
        if not recomputes and self.recomputed is None:
            return self.store.read(site, self.ranges)
        with torch.no_grad():
            if recomputes or self.kept is None:
                return make(input)
            again, kept = self.recomputed, self.kept
            if is_own_rows and self.tensor is not None:
                _, again, kept = self.tensor_rows.recomputed(self.store)
            made, stored = make(input[again]), self.store.read(site, self.kept_ranges)
            output = made.new_empty(input.shape[0], *made.shape[1:])
            output[again], output[kept] = made, stored
            return output
