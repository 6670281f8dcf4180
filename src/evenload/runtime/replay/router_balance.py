"""A load-balancing loss of routers that does not depend on how tokens are packed (Fedus et al. 2021, eq. 4-6)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from evenload.attention.range_attention import work_dtype
from evenload.runtime.replay.context_attention import PackAttention
from evenload.runtime.replay.known_output import known_output
from evenload.types.token_range import Range


@dataclass(eq=False)
class RouterBalance:
    """Switch Transformer's loss over one stage's layers.

    For document d of n_d tokens on layer l, f = share of its tokens that chose expert e (k chosen, so the shares add
    up to k), P = mean probability of e over its tokens, both over whole documents without padding:

        loss = coefficient · Σ_d (n_d / N) · mean over the model's layers l of  E · Σ_e f·P

    with N the tokens of the global batch. f is a count and has no gradient. A document's counts are complete before
    its first backward slice, whatever the packs are, so the gradient is exact under every plan
    (docs/decisions/15). Ranks that share a document add its counts up after each of its forward packs, once for all
    layers of a stage. Of one document and one layer it is transformers' own loss.

    Args:
        coefficient: the loss is multiplied with it; 0 = none.
        num_layers: layers of the whole model.
        num_experts: of a layer.
        layers: indices of the stage's layers.
        num_tokens: of every document of the global batch, without padding.
    """

    coefficient: float
    num_layers: int
    num_experts: int
    layers: tuple[int, ...]
    num_tokens: Mapping[int, int] = field(default_factory=dict)
    _chosen: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    _of_pack: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    _loss: float | Tensor = 0.0

    def begin_step(self, num_tokens: Mapping[int, int]) -> None:
        self.num_tokens = num_tokens
        self._chosen.clear()
        self._of_pack.clear()
        self._loss = 0.0

    def count(self, layer: int, ranges: Sequence[Range], chosen: Tensor) -> None:
        """Count the experts [T, k] that the running forward pack's tokens chose."""
        for (doc_id, _, _), rows in _real_rows(ranges, self.num_tokens):
            _add(self._of_pack, (layer, doc_id), count_values(chosen[rows].flatten(), self.num_experts))

    def end_pack(self, shared: PackAttention | None, device: torch.device) -> None:
        """After a forward pack's last layer. Collective over the ranks that share it, if any do."""
        documents = tuple(dict.fromkeys(shared.documents)) if shared is not None else ()
        if shared is not None and documents:
            nothing = torch.zeros(self.num_experts, dtype=torch.int64, device=device)
            keys = [(layer, doc_id) for layer in self.layers for doc_id in documents]
            mine = torch.stack([self._of_pack.pop(key, nothing) for key in keys])
            everyone = shared.group.all_gather(mine, "counts of experts").wait()
            for key, counts in zip(keys, everyone.view(shared.group.size, *mine.shape).sum(0), strict=True):
                _add(self._chosen, key, counts)
        for key, counts in self._of_pack.items():
            _add(self._chosen, key, counts)
        self._of_pack.clear()

    def add_to(self, layer: int, ranges: Sequence[Range], logits: Tensor) -> Tensor:
        """The logits [T, E] of a backward pack, behind which the loss's gradient is added; counts their share of it."""
        work = work_dtype(logits)
        weights = torch.zeros(logits.shape, dtype=work, device=logits.device)
        scale = self.coefficient * logits.shape[1] / (self.num_layers * sum(self.num_tokens.values()))
        for (doc_id, _, _), rows in _real_rows(ranges, self.num_tokens):
            weights[rows] = self._chosen[layer, doc_id].to(work) * (scale / self.num_tokens[doc_id])
        with torch.no_grad():
            probabilities = logits.to(work).softmax(-1)
            loss = (weights * probabilities).sum(-1, keepdim=True)
            # d/dlogit of Σ w·p, softmax differentiated by hand.
            extra = (probabilities * (weights - loss)).to(logits.dtype)
            self._loss = self._loss + loss.sum().double()
        return known_output(logits.detach(), lambda grad: grad + extra, logits)

    def take_loss(self) -> Tensor:
        """The loss of all packs since the last call; fp64 scalar on the device."""
        loss, self._loss = torch.as_tensor(self._loss, dtype=torch.float64), 0.0
        return loss


def count_values(values: Tensor, size: int) -> Tensor:
    """How often each of 0..size-1 comes; int64[size]. As `bincount`, which lets the host wait for a GPU."""
    return values.new_zeros(size).scatter_add_(0, values, torch.ones_like(values))


def _add(totals: dict[tuple[int, int], Tensor], key: tuple[int, int], counts: Tensor) -> None:
    totals[key] = totals[key] + counts if key in totals else counts


def _real_rows(ranges: Sequence[Range], num_tokens: Mapping[int, int]):
    """Ranges with the rows of a pack that hold their tokens and no padding."""
    row = 0
    for doc_id, start, stop in ranges:
        yield (doc_id, start, stop), slice(row, row + max(0, min(stop, num_tokens[doc_id]) - start))
        row += stop - start
