"""`TreePacker`: sequences that share prefixes as micro-batches in which a shared prefix is computed once, for any loop.

    packer = TreePacker(max_tokens=16384, model=model)
    for batch in packer.pack(sequences, weights, groups):
        logps = batch.path_logps(model(**batch.inputs).logits)     # {place in sequences: log-probabilities [n - 1]}

A micro-batch is trees of unique tokens, depth first (`types.tree`), with positions along the path. A node and its
largest child are one range of rows for attention, so there are as many ranges as leaves. Needs torch and numpy.
"""

import inspect
import itertools
from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from evenload.data.prefix_tree import (
    PrefixTree,
    TreeLabels,
    as_token_ids,
    build_trees,
    checked_weights,
    count_once,
    sequences_in_order,
)
from evenload.errors import ConfigError, UnsupportedModelError
from evenload.integrations.tree_attention import hf_model, own_attention, prove_paths, take_tree_attention
from evenload.types.tree import TreeShape

_MIN_SHARED = 64
_CHUNK_BYTES = 2**28  # of float32 logits that are held at once


@dataclass(eq=False)
class _Part:
    """Describes a tree, or a part of one that is too large; places, labels (1 or 0) and weights are of its leaves."""

    tree: PrefixTree
    places: list[int]
    labels: list[NDArray[np.float64]]
    weights: list[NDArray[np.float64]]
    num_recomputed: int
    work: float


class TreeBatch:
    """Holds a micro-batch of trees on the model's device.

    Attributes:
        inputs: what `model(**batch.inputs)` takes: `input_ids`, `position_ids` (along the path) int64[1, n];
            `key_index` int64[m], the row of every key; `cu_seq_lens_q`, `cu_seq_lens_k` int32[ranges + 1], where ranges
            of rows and of their keys begin; `max_length_q`, `max_length_k`, bounds of single ranges; for transformers'
            models also `use_cache` and `logits_to_keep` int64[r], the rows that predict a label.
        sequences: places of the sequences among those packed.
        num_tokens, num_path_tokens: that are computed; of all sequences.
        num_recomputed_tokens: that another micro-batch computes, too, because a tree was too large for one.
    """

    def __init__(self, parts: Sequence[_Part], more: dict[str, Any], device: torch.device) -> None:
        names = "ids positions keys num_rows num_keys rows targets index weights"
        columns: dict[str, list[Any]] = {name: [] for name in names.split()}
        first_row = first_edge = 0
        for part in parts:
            tree, shape = part.tree, TreeShape(part.tree.segments)
            for own, _, seen in shape.path_ranges(0, shape.num_rows):
                columns["keys"] += [np.arange(*run) + first_row for run in seen]
                columns["num_rows"].append(own.stop - own.start)
                columns["num_keys"].append(sum(run.stop - run.start for run in seen))
            edge_rows, labelled = shape.edges(0, shape.num_rows)
            has_label = tree.weights[labelled] != 0
            edge_rows, labelled = edge_rows[has_label], labelled[has_label]
            edge_of = np.full(len(tree.tokens), -1)
            edge_of[labelled] = np.arange(len(labelled)) + first_edge
            for leaf, segment in tree.leaves:
                edges = np.concatenate([edge_of[slice(*run)] for run in shape.paths[segment]])
                columns["index"].append(np.where(part.labels[leaf], edges, -1)[1:])
                columns["weights"].append(part.weights[leaf][1:])
            columns["ids"].append(tree.tokens)
            columns["positions"].append(shape.positions(0, shape.num_rows))
            columns["rows"].append(edge_rows + first_row)
            columns["targets"].append(tree.tokens[labelled])
            first_row, first_edge = first_row + len(tree.tokens), first_edge + len(labelled)
        self.sequences = tuple(part.places[leaf] for part in parts for leaf, _ in part.tree.leaves)
        self.num_tokens, self.num_path_tokens = first_row, sum(part.tree.num_path_tokens for part in parts)
        self.num_recomputed_tokens = sum(part.num_recomputed for part in parts)

        def held(found: Sequence[Any], dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.from_numpy(np.concatenate(found)).to(device, dtype)

        # A row before a branch has several labels, so there are fewer rows of logits than labels. One row always stays.
        kept, edge_row = np.unique(np.concatenate(columns["rows"]), return_inverse=True)
        self._rows = held([kept if len(kept) else np.zeros(1, np.int64)])
        self._edges = held([edge_row]), held(columns["targets"])
        self._index, self._weights = held(columns["index"]), held(columns["weights"], torch.float64)
        self._sizes = [len(one) for one in columns["index"]]
        self.inputs: dict[str, Any] = {
            "input_ids": held(columns["ids"])[None],
            "position_ids": held(columns["positions"])[None],
            "key_index": held(columns["keys"]),
            "cu_seq_lens_q": held([[0], np.cumsum(columns["num_rows"])], torch.int32),
            "cu_seq_lens_k": held([[0], np.cumsum(columns["num_keys"])], torch.int32),
            # FlashAttention 2 is wrong where only the longest of several ranges has one row and the bound says so.
            "max_length_q": max(2, *columns["num_rows"]),
            "max_length_k": max(columns["num_keys"]),
            **more,
        }
        if "logits_to_keep" in more:
            self.inputs["logits_to_keep"] = self._rows

    @property
    def weights(self) -> dict[int, Tensor]:
        """Return by place in the sequences packed the weights of its tokens but the first, float64[n - 1]; with
        `tree_labels = "once"` 0 where another sequence has the label."""
        return self._by_place(self._weights)

    def path_logps(self, logits: Tensor) -> dict[int, Tensor]:
        """Return by place in the sequences packed the log-probabilities of its tokens but the first, float[n - 1],
        as if it had been run by itself; 0 without a gradient for tokens of weight 0.

        Args:
            logits: [1, n, vocabulary], or of the rows `logits_to_keep`; half precisions give float32. `ConfigError`:
                another number of rows.
        """
        of_labels = self._label_logps(logits)
        return self._by_place(torch.cat([of_labels, of_labels.new_zeros(1)])[self._index])  # -1 is the last

    def loss(self, logits: Tensor) -> Tensor:
        """Return the sum over all sequences of -weight · log-probability; weights are those that were packed, so this
        is supervised training, or policy gradient without clipping where they are advantages. Logits as above."""
        of_labels = self._label_logps(logits)
        has_label = self._index >= 0
        weights = self._weights.new_zeros(len(of_labels)).index_add_(
            0, self._index[has_label], self._weights[has_label]
        )
        return -(weights.to(of_labels.dtype) * of_labels).sum()

    def label_rows(self, logits: Tensor) -> Tensor:
        """Return the logits [r, vocabulary] of rows that predict labels. Logits as of `path_logps`."""
        rows = logits.flatten(0, -2)
        if len(rows) not in (self.num_tokens, len(self._rows)):
            raise ConfigError(
                f"logits have {len(rows)} rows, the micro-batch {self.num_tokens} tokens, {len(self._rows)} of which "
                "predict labels; give those of model(**batch.inputs)"
            )
        return rows if len(rows) == len(self._rows) else rows[self._rows]

    def _label_logps(self, logits: Tensor) -> Tensor:
        found = _LabelLogps.apply(self.label_rows(logits), *self._edges)
        assert isinstance(found, Tensor)
        return found

    def _by_place(self, of_paths: Tensor) -> dict[int, Tensor]:
        return dict(zip(self.sequences, of_paths.split(self._sizes), strict=True))


class TreePacker:
    """Packs sequences that share prefixes into micro-batches in which a shared prefix is computed once.

    transformers' models are served as they are: their attention is `tree_attention` from then on, and everything but
    micro-batches is run under `paused`. Others take `TreeBatch.inputs` and call it. Price at construction: four or five
    forwards of at most 22 tokens, which prove that the model sees paths only.

    Args:
        max_tokens: most unique tokens of a micro-batch.
        model: on its device, in any wrapper that passes keyword arguments on.
        min_shared_tokens: a prefix is shared only where it goes on for as many tokens since the last branch; a shorter
            one is computed by every sequence.
        tree_labels: "once" counts a label that sequences share once, in `TreeBatch.weights` and `loss`; all of them
            must have one weight.

    Raises:
        ConfigError: a limit below 1, or `tree_labels` that are unknown.
        UnsupportedModelError: encoder-decoders, recurrent layers, attention in chunks, with sinks or capped scores,
            dropout, balance losses of experts, attention that cannot be exchanged, or a model that fails the proof.
    """

    def __init__(
        self,
        max_tokens: int,
        model: nn.Module,
        *,
        min_shared_tokens: int = _MIN_SHARED,
        tree_labels: TreeLabels = "sum",
    ) -> None:
        if max_tokens < 1 or min_shared_tokens < 1:
            raise ConfigError(f"max_tokens = {max_tokens}, min_shared_tokens = {min_shared_tokens}; give at least 1")
        if tree_labels not in ("sum", "once"):
            raise ConfigError(f"tree_labels = '{tree_labels}'; give 'sum' or 'once'")
        self._max_tokens, self._min_shared, self._labels = max_tokens, min_shared_tokens, tree_labels
        self._model, self._hf = model, hf_model(model)
        embedding = next((one for one in model.modules() if isinstance(one, nn.Embedding)), None)
        if embedding is None or embedding.num_embeddings < 2:
            raise UnsupportedModelError(f"{type(model).__name__} has no nn.Embedding of tokens, so it takes none")
        self._width, self._device = embedding.embedding_dim, embedding.weight.device
        self._more: dict[str, Any] = {} if self._hf is None else {"use_cache": False}
        if self._hf is not None and "logits_to_keep" in inspect.signature(self._hf.forward).parameters:
            self._more["logits_to_keep"] = None
        take_tree_attention(model)
        ids = np.random.default_rng(0).integers(0, embedding.num_embeddings, (4, 8)).astype(np.int32)
        ids[1:, 0] = 0, 1, 0  # siblings branch at one place, whatever follows
        prefix, first, second, changed = ids
        paths = [np.concatenate([prefix, one]) for one in (first, second[:6], changed)]
        prove_paths(model, lambda other, alone: self._probe(paths[2 if other else 0], paths[1], alone=alone))

    def paused(self) -> AbstractContextManager[None]:
        """Give the model its own attention meanwhile, to generate or evaluate; no backward of a micro-batch inside."""
        return own_attention(self._model)

    def pack(
        self,
        sequences: Sequence[ArrayLike],
        weights: Sequence[ArrayLike],
        groups: Sequence[Hashable] | None = None,
        *,
        whole_groups: bool = False,
    ) -> list[TreeBatch]:
        """Return micro-batches of at most `max_tokens` unique tokens, the same for the same arguments.

        The sequences of a group are in one micro-batch, unless they have too many unique tokens: then runs of the
        leaves of their tree are, each of which computes the path to its first one again.

        Args:
            sequences: int[n_i] token ids.
            weights: float[n_i], of each token as a label; 0 = no label: its log-probability is not computed. Give 1
                where a loss of your own reads it, whatever its advantage is.
            groups: of each sequence; prefixes are shared inside a group only (a prompt's id); default: among all.
            whole_groups: refuse a group that has too many tokens, for a loss that compares its sequences (DPO).

        Raises:
            ConfigError: a sequence, or a whole group, of more than `max_tokens`, or another number of groups.
            DataError: an empty sequence, other than one finite weight a token, or "once" with different weights.
        """
        own = as_token_ids(sequences)
        # Elements of a tensor are objects of their own, each another group.
        groups = groups.tolist() if isinstance(groups, Tensor) else groups
        counted = checked_weights(own, weights)
        if groups is not None and len(groups) != len(own):
            raise ConfigError(f"{len(own)} sequences have {len(groups)} groups; give one each")
        longest = max(range(len(own)), key=lambda place: len(own[place]), default=-1)
        if longest >= 0 and len(own[longest]) > self._max_tokens:
            raise ConfigError(
                f"sequence {longest} has {len(own[longest])} tokens, a micro-batch at most max_tokens = "
                f"{self._max_tokens}; raise it, or leave the sequence out"
            )
        members: dict[Hashable, list[int]] = {}
        for place in range(len(own)):
            members.setdefault(groups[place] if groups is not None else None, []).append(place)
        units: list[list[_Part]] = []
        for name, group in members.items():
            parts = list(self._parts(group, own, counted))
            fits = _num_tokens(parts) <= self._max_tokens
            if whole_groups and not fits:
                unique = _num_tokens(parts) - sum(part.num_recomputed for part in parts)
                raise ConfigError(
                    f"group {name!r} has {unique} unique tokens in {len(group)} sequences, a micro-batch at most "
                    f"max_tokens = {self._max_tokens}; raise it, or leave the group out"
                )
            units += [parts] if fits and (whole_groups or groups is not None) else [[part] for part in parts]
        return [TreeBatch(parts, self._more, self._device) for parts in self._fill(units)]

    def _parts(
        self, group: Sequence[int], own: Sequence[NDArray[np.int32]], weights: list[NDArray[np.float64]]
    ) -> Iterator[_Part]:
        """Yield the trees of a group, or parts of them that fit."""
        labels = {place: (weights[place] != 0).astype(np.float64) for place in group}  # before they count once
        inside = [own[place] for place in group]
        if self._labels == "once":
            order, shared = sequences_in_order(inside)
            count_once(own, weights, [group[at] for at in order], shared)
        for whole in build_trees(inside, [labels[place] for place in group], min_shared_tokens=self._min_shared):
            shape = TreeShape(whole.segments)
            for part in shape.parts(shape.cuts_within(self._max_tokens)):
                places = [group[at] for at, segment in whole.leaves if segment in part.own]
                has_label, counted = ([one[place] for place in places] for one in (labels, weights))
                (tree,) = build_trees([own[place] for place in places], has_label, min_shared_tokens=self._min_shared)
                num_pairs = float((TreeShape(tree.segments).positions(0, len(tree.tokens)) + 1).sum())
                # In tokens: a pair of a row and a key costs 4 · width a layer, a token about 24 · width².
                work = len(tree.tokens) + num_pairs / (6 * self._width)
                yield _Part(tree, places, has_label, counted, part.num_recomputed, work)

    def _fill(self, units: list[list[_Part]]) -> list[list[_Part]]:
        """Give units, the most work first, to the micro-batch of the least work that has room."""
        filled: list[list[_Part]] = [[] for _ in range(-(-sum(map(_num_tokens, units)) // self._max_tokens))]
        for unit in sorted(units, key=_work, reverse=True):
            room = [parts for parts in filled if _num_tokens(parts) + _num_tokens(unit) <= self._max_tokens]
            if room:
                min(room, key=_work).extend(unit)
            else:
                filled.append(unit)
        return filled

    @torch.no_grad()
    def _probe(self, *paths: NDArray[np.int32], alone: bool = False) -> tuple[Tensor, ...]:
        """Return the logits of paths of a tree, or of each by itself and, where it has one, by its own attention."""
        if alone and len(paths) > 1:
            return tuple(self._probe(one, alone=True)[0] for one in paths)
        if alone and self._hf is not None:
            given = torch.from_numpy(paths[0]).to(self._device, torch.int64)[None]
            with self.paused():
                return (_logits_of(self._model(input_ids=given, use_cache=False))[0, :-1],)
        ones = [np.ones(len(one)) for one in paths]
        (tree,) = build_trees(paths, ones)
        batch = TreeBatch([_Part(tree, [*range(len(paths))], ones, ones, 0, 0.0)], self._more, self._device)
        rows = batch.label_rows(_logits_of(self._model(**batch.inputs)))
        found = dict(zip(batch.sequences, rows[batch._edges[0][batch._index]].split(batch._sizes), strict=True))
        return tuple(found[at] for at in range(len(paths)))


def _logits_of(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.logits


def _num_tokens(parts: Sequence[_Part]) -> int:
    return sum(len(part.tree.tokens) for part in parts)


def _work(parts: Sequence[_Part]) -> float:
    return sum(part.work for part in parts)


class _LabelLogps(torch.autograd.Function):
    """Log-probabilities [labels] of pairs (row of logits, target), in order of rows. Backward computes softmax again,
    so that nothing of the logits' size is held but their gradient, in their precision."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, rows: Tensor, targets: Tensor) -> Tensor:
        wide = torch.promote_types(logits.dtype, torch.float32)
        ctx.size = max(1, _CHUNK_BYTES // (4 * logits.shape[-1]))
        sums = torch.cat([chunk.to(wide).logsumexp(-1) for chunk in logits.split(ctx.size)])
        ctx.save_for_backward(logits, sums, rows, targets)
        return logits[rows, targets].to(wide) - sums[rows]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError("log-probabilities of a TreeBatch have no second derivative")
        (grad,), (logits, sums, rows, targets) = grad_outputs, ctx.saved_tensors
        of_rows = torch.zeros_like(sums).index_add_(0, rows, grad)
        found, starts = torch.empty_like(logits), range(0, len(logits), ctx.size)
        edges = torch.searchsorted(rows, torch.tensor([*starts, len(logits)], device=rows.device)).tolist()
        for start, (first, last) in zip(starts, itertools.pairwise(edges), strict=True):
            at = slice(start, start + ctx.size)
            part = (logits[at].to(sums.dtype) - sums[at, None]).exp_().mul_(-of_rows[at, None])
            # Before it is rounded: where a label is all but certain little is left of the difference.
            part.index_put_((rows[first:last] - start, targets[first:last]), grad[first:last], accumulate=True)
            found[at] = part
        return found, None, None
