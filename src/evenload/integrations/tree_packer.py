"""`TreePacker`: sequences that share prefixes, as micro-batches in which a shared prefix is computed once, for any loop.

    packer = TreePacker(max_tokens=16384, model=model)
    for batch in packer.pack(sequences, weights, groups):
        logps = batch.path_logps(model(**batch.inputs).logits)     # {place in sequences: log-probabilities [n - 1]}

    sequences       rows             attention: ranges of rows, and the keys of each
    a b c d         a b c d f e      a b c d  sees  a b c d        the masks of both end bottom-right, as those of
    a b c f                          f        sees  a b c f        kernels with cumulative lengths do
    a b e                            e        sees  a b e

A micro-batch is trees of unique tokens, depth first (`types.tree`). Where a node's largest child lies behind it, both are
one range of rows, so there are as many ranges as leaves and only what lies before a range is copied, once a layer.
Autograd adds up the gradients of shared rows; positions and windows count along the path. Needs torch and numpy.
"""

import bisect
import inspect
import itertools
import sys
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from evenload.data.prefix_tree import (
    PrefixTree,
    TreeLabels,
    build_trees,
    checked_weights,
    count_once,
    edges_of,
    num_unique_tokens,
    sequences_in_order,
)
from evenload.errors import ConfigError, EvenloadError, UnsupportedModelError
from evenload.types.tree import RowRun, TreeShape, joined

_NAME = "evenload_tree"
_MIN_SHARED = 64
_CHUNK_BYTES = 2**28  # of float32 logits that are held at once
_BEFORE: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
"""The attention that models had."""
_FLAT = "train its sequences path by path, which every trainer does"


class TreeBatch:
    """Holds a micro-batch of trees on the model's device.

    Attributes:
        inputs: what `model(**batch.inputs)` takes: `input_ids`, `position_ids` (along the path) int64[1, n];
            `key_index` int64[m], the row of every key; `cu_seq_lens_q`, `cu_seq_lens_k` int32[ranges + 1], where ranges
            of rows and of keys begin; `max_length_q`, `max_length_k`, bounds of single ranges; for transformers' models
            also `use_cache` and `logits_to_keep` int64[r], the rows that predict a label.
        sequences: places of the sequences among those packed.
        num_tokens, num_path_tokens: that are computed; of all sequences.
        num_recomputed_tokens: that other micro-batches compute, too, because a tree was too large for one.
    """

    def __init__(self, parts: "Sequence[_Part]", is_hf: bool, keeps_logits: bool, device: torch.device) -> None:
        trees = [part.tree for part in parts]
        ids, positions, keys, num_rows, num_keys = [], [], [], [0], [0]
        rows, targets, index, weights = [], [], [], []
        first_row, first_edge = 0, 0
        self.sequences = tuple(part.places[leaf] for part in parts for leaf, _ in part.tree.leaves)
        for part in parts:
            tree, shape = part.tree, TreeShape(part.tree.segments)
            paths = _paths(shape)
            for own, seen in _ranges(shape, paths):
                keys += [np.arange(*run) + first_row for run in seen]
                num_rows.append(own.stop - own.start)
                num_keys.append(sum(run.stop - run.start for run in seen))
            edge_rows, labelled = edges_of(shape, tree.weights)
            edge_of = np.full(len(tree.tokens), -1)
            edge_of[labelled] = np.arange(len(labelled)) + first_edge
            for leaf, segment in tree.leaves:
                index.append(np.concatenate([edge_of[slice(*run)] for run in paths[segment]])[1:])
                weights.append(part.weights[leaf][1:])
            ids.append(tree.tokens)
            positions.append(shape.positions(0, shape.num_rows))
            rows.append(edge_rows + first_row)
            targets.append(tree.tokens[labelled])
            first_row, first_edge = first_row + len(tree.tokens), first_edge + len(labelled)
        self.num_tokens, self.num_path_tokens = first_row, sum(tree.num_path_tokens for tree in trees)
        self.num_recomputed_tokens = sum(part.num_recomputed for part in parts)

        def held(columns: Sequence[NDArray[Any]], dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.from_numpy(np.concatenate(columns)).to(device, dtype)

        # A row before a branch has several labels, so there are fewer rows of logits than labels. One row always stays.
        kept, edge_row = np.unique(np.concatenate(rows), return_inverse=True)
        self._rows = held([kept if len(kept) else np.zeros(1, np.int64)])
        self._edges = held([edge_row]), held(targets)
        self._index, self._weights = held(index), held(weights, torch.float64)
        self._sizes = [len(one) for one in index]
        self.inputs: dict[str, Any] = {
            "input_ids": held(ids)[None],
            "position_ids": held(positions)[None],
            "key_index": held(keys),
            "cu_seq_lens_q": held([np.cumsum(num_rows)], torch.int32),
            "cu_seq_lens_k": held([np.cumsum(num_keys)], torch.int32),
            # FlashAttention 2 is wrong where only the longest of several ranges has one row and the bound says so.
            "max_length_q": max(2, *num_rows),
            "max_length_k": max(num_keys),
        }
        if is_hf:
            self.inputs["use_cache"] = False
        if keeps_logits:
            self.inputs["logits_to_keep"] = self._rows

    @property
    def weights(self) -> dict[int, Tensor]:
        """Return by place in the sequences packed the weights of its tokens but the first, float64[n - 1]; with
        `tree_labels = "once"` 0 where another sequence has the label."""
        return dict(zip(self.sequences, self._weights.split(self._sizes), strict=True))

    def path_logps(self, logits: Tensor) -> dict[int, Tensor]:
        """Return by place in the sequences packed the log-probabilities of its tokens but the first, float[n - 1],
        as if it had been run by itself; 0 without a gradient for tokens of weight 0, which are not computed.

        Args:
            logits: [1, n, vocabulary], or of the rows `logits_to_keep` only; half precisions give float32. `ConfigError`:
                another number of rows.
        """
        of_labels = self._logps(logits)
        of_paths = torch.cat([of_labels, of_labels.new_zeros(1)])[self._index]  # -1 is the last
        return dict(zip(self.sequences, of_paths.split(self._sizes), strict=True))

    def loss(self, logits: Tensor) -> Tensor:
        """Return the sum over all sequences of -weight · log-probability; weights are those that were packed, so this
        is supervised training, or policy gradient without clipping where they are advantages. Logits as above."""
        of_labels = self._logps(logits)
        weights = self._weights.new_zeros(len(of_labels) + 1).index_add_(
            0, self._index % (len(of_labels) + 1), self._weights
        )
        return -(weights[:-1].to(of_labels.dtype) * of_labels).sum()

    def label_rows(self, logits: Tensor) -> Tensor:
        """Return the logits [r, vocabulary] of rows that predict labels. Logits as of `path_logps`."""
        rows = logits.flatten(0, -2)
        if len(rows) == len(self._rows):
            return rows
        if len(rows) != self.num_tokens:
            raise ConfigError(
                f"logits have {len(rows)} rows, the micro-batch {self.num_tokens} tokens, {len(self._rows)} of which "
                "predict labels; give those of model(**batch.inputs)"
            )
        return rows[self._rows]

    def _logps(self, logits: Tensor) -> Tensor:
        found = _LabelLogps.apply(self.label_rows(logits), *self._edges)
        assert isinstance(found, Tensor)
        return found


def tree_attention(
    query: Tensor, key: Tensor, value: Tensor, inputs: Mapping[str, Any], *, window: int = 0, scale: float | None = None
) -> Tensor:
    """Return the attention of the rows of a micro-batch, each to those of its path up to itself, [n, heads, dim of
    values]; for models of one's own. On GPUs in half precision one call of torch's `varlen_attn`, else a call of
    scaled dot products a range of rows.

    Args:
        query: [n, heads, dim].
        key, value: [n, heads or fewer that divide them, dim], rotated by `position_ids`.
        inputs: `TreeBatch.inputs`, or any mapping with `key_index`, `cu_seq_lens_*` and `max_length_*` of it.
        window: keys that a row sees along its path, itself too; 0 = all.
        scale: of scores; default: 1 / sqrt(dim).
    """
    index, edges = inputs["key_index"], (inputs["cu_seq_lens_q"], inputs["cu_seq_lens_k"])
    if len(index) != len(key):  # else nothing lies before any range
        key, value = key.index_select(0, index), value.index_select(0, index)
    is_grouped = query.shape[1] != key.shape[1]
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        from torch.nn.attention.varlen import varlen_attn

        width = value.shape[-1]
        value = nn.functional.pad(value, (0, query.shape[-1] - width))  # the kernel has one width for all
        longest = inputs["max_length_q"], inputs["max_length_k"]
        seen = (window - 1 if window else -1, 0)
        out = varlen_attn(
            query, key, value, *edges, *longest, scale=scale, window_size=seen, enable_gqa=is_grouped
        )  # fmt: skip
        assert isinstance(out, Tensor)
        return out[..., :width]
    query, key, value = (one.transpose(0, 1)[None] for one in (query, key, value))
    found = []
    for (start, stop), (first, last) in zip(*(itertools.pairwise(one.tolist()) for one in edges), strict=True):
        rows = stop - start
        first = max(first, last - rows - window + 1) if window else first
        is_square = last - first == rows and not 0 < window < rows
        mask = None if is_square else _visible(rows, last - first, window, query.device)
        own = query[:, :, start:stop], key[:, :, first:last], value[:, :, first:last]
        found.append(
            nn.functional.scaled_dot_product_attention(
                *own, attn_mask=mask, is_causal=is_square, scale=scale, enable_gqa=is_grouped
            )
        )
    return torch.cat(found, 2)[0].transpose(0, 1)


class TreePacker:
    """Packs sequences that share prefixes into micro-batches in which a shared prefix is computed once.

    The model's attention is `tree_attention` from then on, and only micro-batches can be run (`paused` for all else).
    transformers' models are served as they are; others call `tree_attention` and take `TreeBatch.inputs`. Price at
    construction: five forwards of 24 tokens, which prove that the model sees paths only.

    Args:
        max_tokens: most unique tokens of a micro-batch.
        model: any model, on its device, in any wrapper that passes keyword arguments on.
        min_shared_tokens: a prefix is shared only where it goes on for as many tokens since the last branch; a shorter
            one costs more as a range of its own than computing it again does.
        tree_labels: "once" counts a label that sequences share once, in `TreeBatch.weights` and `loss`; all of them must
            have one weight.

    Raises:
        ConfigError: a limit below 1, or `tree_labels` that are unknown.
        UnsupportedModelError: encoder-decoders, recurrent layers, attention in chunks, with sinks or capped scores, dropout,
            balance losses of experts, attention that cannot be exchanged, or a model that fails the proof.
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
        self._hf = hf = _hf_model(model)
        self._keeps_logits = hf is not None and "logits_to_keep" in inspect.signature(hf.forward).parameters
        embedding = next((one for one in model.modules() if isinstance(one, nn.Embedding)), None)
        if embedding is None:
            raise UnsupportedModelError(f"{type(model).__name__} has no nn.Embedding, so it takes no tokens")
        self._width, self._device = embedding.embedding_dim, embedding.weight.device
        if why := _reason_against(model, hf):
            raise UnsupportedModelError(f"{type(hf or model).__name__} {why}")
        if hf is not None:
            _register()
            if hf.config._attn_implementation != _NAME:
                _BEFORE[hf] = hf.config._attn_implementation
            hf.set_attn_implementation(_NAME)
        try:
            self._prove(model, embedding.num_embeddings)
        except BaseException:
            if hf is not None:
                hf.set_attn_implementation(_BEFORE.pop(hf))
            raise

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Give the model its own attention, to generate or evaluate; backward of a micro-batch belongs outside."""
        if self._hf is None:
            yield
            return
        self._hf.set_attn_implementation(_BEFORE[self._hf])
        try:
            yield
        finally:
            self._hf.set_attn_implementation(_NAME)

    def pack(
        self, sequences: Sequence[ArrayLike], weights: Sequence[ArrayLike], groups: Sequence[Hashable] | None = None
    ) -> list[TreeBatch]:
        """Return micro-batches of at most `max_tokens` unique tokens, the same for the same arguments.

        Sequences of a group are in one micro-batch, unless it has too many unique tokens: then runs of its sequences in
        lexicographic order are, and each run computes the path to its first one again.

        Args:
            sequences: int[n_i] token ids.
            weights: float[n_i], of each token as a label; 0 = no label: its log-probability is not computed. Give 1
                where a loss of your own reads it, whatever its advantage is.
            groups: of each sequence, which share prefixes inside a group only (the prompt's id); default: all may share.

        Raises:
            ConfigError: a sequence longer than `max_tokens`, or another number of groups.
            DataError: an empty sequence, other than one finite weight a token, or "once" with different weights.
        """
        own = [np.asarray(one, np.int32) for one in sequences]
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
        for group in members.values():
            trees = self._trees([own[place] for place in group], group, own, counted)
            parts = [part for tree in trees for part in tree]
            fits = groups is not None and sum(len(part.tree.tokens) for part in parts) <= self._max_tokens
            units += [parts] if fits else [[part] for part in parts]
        return [TreeBatch(parts, self._hf is not None, self._keeps_logits, self._device) for parts in self._fill(units)]

    def _trees(
        self,
        sequences: Sequence[NDArray[np.int32]],
        group: Sequence[int],
        own: Sequence[NDArray[np.int32]],
        weights: list[NDArray[np.float64]],
    ) -> "Iterator[list[_Part]]":
        """Yield the trees of a group, each as the parts that fit."""
        has_label = [(weights[place] != 0).astype(np.float64) for place in group]  # before they count once
        order, shared = sequences_in_order(sequences)
        if self._labels == "once":
            count_once(own, weights, [group[at] for at in order], shared)
        lengths = [len(sequences[at]) for at in order]

        def fits(start: int, stop: int) -> bool:
            return num_unique_tokens(lengths, shared, range(start, stop), self._min_shared) <= self._max_tokens

        cuts = np.flatnonzero(shared < self._min_shared)
        for begin, end in itertools.pairwise([*cuts.tolist(), len(order)]):
            parts: list[_Part] = []
            start = begin
            while start < end:
                stop = end if fits(start, end) else start + bisect.bisect_left(
                    range(start + 2, end), True, key=lambda at, start=start: not fits(start, at)
                ) + 1  # fmt: skip
                inside = order[start:stop]
                (tree,) = build_trees(
                    [sequences[at] for at in inside],
                    [has_label[at] for at in inside],
                    min_shared_tokens=self._min_shared,
                )
                again = int(shared[start]) if start > begin else 0
                places = [group[at] for at in inside]
                parts.append(_Part(tree, places, [weights[place] for place in places], again))
                start = stop
            yield parts

    def _fill(self, units: "list[list[_Part]]") -> "list[list[_Part]]":
        """Give units, the most work first, to the micro-batch of the least work that has room."""
        sizes = [sum(len(part.tree.tokens) for part in parts) for parts in units]
        works = [sum(_work(part.tree, self._width) for part in parts) for parts in units]
        filled: list[list[_Part]] = [[] for _ in range(-(-sum(sizes) // self._max_tokens))]
        tokens, load = [0] * len(filled), [0.0] * len(filled)
        for at in sorted(range(len(units)), key=lambda at: -works[at]):
            room = [to for to, held in enumerate(tokens) if held + sizes[at] <= self._max_tokens]
            to = min(room, key=load.__getitem__, default=len(filled))
            if to == len(filled):
                for column, nothing in ((filled, []), (tokens, 0), (load, 0.0)):
                    column.append(nothing)
            filled[to] += units[at]
            tokens[to] += sizes[at]
            load[to] += works[at]
        return filled

    @torch.no_grad()
    def _prove(self, model: nn.Module, vocabulary: int) -> None:
        """Raise an `UnsupportedModelError` where a path gets anything of its sibling, or is not as alone."""
        ids = np.random.default_rng(0).integers(0, vocabulary, (4, 8)).astype(np.int32)
        ids[1:, 0] = 0, 1 % vocabulary, 0  # siblings that branch at the same place whatever their other tokens are
        prefix, first, other, changed = ids
        first, changed, other = (
            np.concatenate([prefix, first]),
            np.concatenate([prefix, changed]),
            np.concatenate([prefix, other[:6]]),
        )

        def run(*sequences: NDArray[np.int32]) -> list[Tensor]:
            ones = [np.ones(len(one)) for one in sequences]
            trees = build_trees(sequences, ones)
            parts = [_Part(tree, [*range(len(sequences))], ones, 0) for tree in trees]
            batch = TreeBatch(parts, self._hf is not None, self._keeps_logits, self._device)
            rows = batch.label_rows(_logits_of(model(**batch.inputs)))
            order = np.argsort(batch.sequences)
            found = rows[batch._edges[0][batch._index]].split(batch._sizes)
            return [found[at].double() for at in order]

        def run_alone(tokens: NDArray[np.int32]) -> Tensor:
            if self._hf is None:
                return run(tokens)[0]
            with self.paused():
                given = torch.from_numpy(tokens).to(self._device, torch.int64)[None]
                return _logits_of(model(input_ids=given, use_cache=False))[0, :-1].double()

        try:
            (seen, behind), (_, moved) = run(first, other), run(changed, other)
            alone = [run_alone(tokens) for tokens in (first, other)]
        except EvenloadError:
            raise
        except Exception as error:  # of any kind: models from elsewhere
            raise UnsupportedModelError(
                f"{type(model).__name__} cannot run a micro-batch of trees ({type(error).__name__}: {error}); it must take "
                f"TreeBatch.inputs as keyword arguments and attend by tree_attention, or {_FLAT}"
            ) from error
        rounding, most = _TOLERANCES[next(model.parameters()).dtype]
        leak = _relative(moved, behind)
        if not leak <= rounding:
            raise UnsupportedModelError(
                f"{type(model).__name__} lets a path see its sibling ({leak:.1e} of its logits, rounding: {rounding:.1e}): a "
                f"layer goes from row to row, or attends without tree_attention; {_FLAT}"
            )
        error = max(_relative(a, b) for a, b in zip((seen, behind), alone, strict=True))
        if not error <= most:
            raise UnsupportedModelError(
                f"{type(model).__name__} computes a path of a tree otherwise than alone (logits are off by {error:.1e}, "
                f"allowed {most:.1e}): positions or masks are not those of position_ids; {_FLAT}"
            )


class _Part(NamedTuple):
    """Describes a tree, or a part of one, whose weights say which tokens have labels; `places` and `weights` are of its
    leaves."""

    tree: PrefixTree
    places: list[int]
    weights: list[NDArray[np.float64]]
    num_recomputed: int


_TOLERANCES = {
    torch.float64: (1e-14, 1e-8), torch.float32: (1e-6, 1e-3), torch.bfloat16: (0.03, 0.1), torch.float16: (0.004, 0.02),
}  # fmt: skip
"""Of logits, relative: what other tokens in other rows change by rounding, and what other kernels do."""


def _relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def _logits_of(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.logits


def _paths(shape: TreeShape) -> list[list[RowRun]]:
    """Return the rows of every segment's path."""
    paths: list[list[RowRun]] = []
    for parent, start, stop in zip(shape.parents.tolist(), shape.starts.tolist(), shape.stops.tolist(), strict=True):
        above = paths[parent] if parent >= 0 else []
        paths.append(joined([*above, RowRun(start, stop)]))
    return paths


def _ranges(shape: TreeShape, paths: Sequence[list[RowRun]]) -> Iterator[tuple[RowRun, list[RowRun]]]:
    """Yield ranges of rows each of which sees the one before, and the rows that they see."""
    parents = shape.parents.tolist()
    begins = [at for at, parent in enumerate(parents) if parent != at - 1 or parent < 0]
    for first, behind in itertools.pairwise([*begins, len(parents)]):
        own = RowRun(int(shape.starts[first]), int(shape.stops[behind - 1]))
        yield own, joined([*(paths[parents[first]] if parents[first] >= 0 else []), own])


def _work(tree: PrefixTree, width: int) -> float:
    """In tokens: a pair of a row and a key costs 4 · width a layer, a token about 24 · width²."""
    shape = TreeShape(tree.segments)
    pairs = int((shape.positions(0, shape.num_rows) + 1).sum())
    return shape.num_rows + pairs / (6 * width)


def _visible(rows: int, keys: int, window: int, device: torch.device) -> Tensor:
    """Which keys rows see whose own keys are the last ones, bool[rows, keys]."""
    row = torch.arange(keys - rows, keys, device=device)[:, None]
    key = torch.arange(keys, device=device)
    return (key <= row) & (key > row - window) if window else key <= row


class _LabelLogps(torch.autograd.Function):
    """Log-probabilities [labels] of (row of logits, target) pairs in order of rows, with one copy of logits at most, their
    gradient: softmax is computed again in backward."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, rows: Tensor, targets: Tensor) -> Tensor:
        wide = torch.promote_types(logits.dtype, torch.float32)
        size = max(1, _CHUNK_BYTES // (4 * logits.shape[-1]))
        sums = torch.cat([chunk.to(wide).logsumexp(-1) for chunk in logits.split(size)])
        ctx.save_for_backward(logits, sums, rows, targets)
        ctx.size = size
        return logits[rows, targets].to(wide) - sums[rows]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        logits, sums, rows, targets = ctx.saved_tensors
        of_rows = torch.zeros_like(sums).index_add_(0, rows, grad)
        found = torch.empty_like(logits)
        starts = range(0, len(logits), ctx.size)
        edges = torch.searchsorted(rows, torch.tensor([*starts, len(logits)], device=rows.device)).tolist()
        for start, (first, last) in zip(starts, itertools.pairwise(edges), strict=True):
            at = slice(start, start + ctx.size)
            part = (logits[at].to(sums.dtype) - sums[at, None]).exp_().mul_(-of_rows[at, None])
            # Before it is rounded: where a label is all but certain little is left of the difference.
            part.index_put_((rows[first:last] - start, targets[first:last]), grad[first:last], accumulate=True)
            found[at] = part
        return found, None, None


def _hf_model(model: nn.Module) -> Any:
    """Return transformers' model in a model and its wrappers; None = there is none."""
    transformers = sys.modules.get("transformers")
    if transformers is None:
        return None
    return next((one for one in model.modules() if isinstance(one, transformers.PreTrainedModel)), None)


def _reason_against(model: nn.Module, hf: Any) -> str:
    """Why paths would not be trained as alone, with what works instead; "" = nothing is known."""
    dropout = (name for name, one in model.named_modules() if isinstance(one, nn.Dropout) and one.p > 0)
    if name := next(dropout, None):
        return f"has dropout in {name}, which paths would share; set its p to 0"
    if hf is None:
        return ""
    config, text = hf.config, hf.config.get_text_config()
    kinds = {*(getattr(text, "layer_types", None) or ())} - {"full_attention", "sliding_attention"}
    if config.is_encoder_decoder:
        return f"is an encoder-decoder, whose decoder sees rows of another model; {_FLAT}"
    if "chunked_attention" in kinds or getattr(text, "attention_chunk_size", None):
        return f"attends in chunks of {getattr(text, 'attention_chunk_size', None)} tokens, which is no window; {_FLAT}"
    if kinds or hf._is_stateful:
        return f"has layers ({', '.join(sorted(kinds)) or 'recurrent'}) whose state goes from row to row; {_FLAT}"
    if getattr(text, "attn_logit_softcapping", None):
        return f"caps attention scores at {text.attn_logit_softcapping:g}, which scaled dot products do not; {_FLAT}"
    if getattr(text, "output_router_logits", False):
        return (
            "trains a balance loss of experts, a product over each path's tokens; set config.output_router_logits = False, "
            f"or {_FLAT}"
        )
    if not hf._can_set_attn_implementation():
        return f"does not attend through transformers' AttentionInterface; {_FLAT}"
    return ""


def _register() -> None:
    """Make `tree_attention` known to transformers."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(_NAME, _attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_NAME, _window_of_mask)


def _window_of_mask(*_: Any, local_size: int | None = None, **__: Any) -> Tensor:
    """Stand in for a mask: its window, 0 = all, on the CPU, so that reading it does not wait for a GPU."""
    return torch.tensor(local_size or 0)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **given: Any,
) -> tuple[Tensor, None]:
    """Attend as one of transformers' functions does: query [1, heads, n, dim] -> [1, n, heads, dim]."""
    if given.get("key_index") is None:
        raise ConfigError(
            "TreePacker has given this model the attention of trees; run it on TreeBatch.inputs, or on anything else "
            "under `with packer.paused():`"
        )
    window, name = sliding_window or 0, type(module).__name__
    unknown = [key for key, one in given.items() if isinstance(one, Tensor) and key not in _KNOWN_TENSORS]
    more = [key for key in ("softcap", "cache") if given.get(key) is not None] + unknown
    if more or dropout or given.get("is_causal") is False or not getattr(module, "is_causal", True):
        what = ", ".join([*more, *([f"dropout = {dropout:g}"] if dropout else [])]) or "no causal mask"
        fix = "set the configuration's dropout to 0" if dropout else _FLAT
        raise UnsupportedModelError(f"{name} attends with {what}, which a tree's attention does not have; {fix}")
    if attention_mask is not None and (attention_mask.ndim or int(attention_mask) != window):
        raise UnsupportedModelError(
            f"{name} attends in a window of {window} (0 = none) under a mask that is another one; {_FLAT}"
        )
    rows = (one[0].transpose(0, 1) for one in (query, key, value))
    return tree_attention(*rows, given, window=window, scale=scaling)[None], None


_KNOWN_TENSORS = {"key_index", "cu_seq_lens_q", "cu_seq_lens_k", "position_ids", "cache_position"}
