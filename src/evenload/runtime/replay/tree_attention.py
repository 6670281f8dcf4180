"""Compute attention of packs with slices of trees, whose rows see keys along their path (`types.tree`).

    rows of a slice       a a a b b c c d     (b and c behind a, d behind b's sibling c)
    ranges of paths       [a a a b b] [c c d]
    keys that they see    rows of a and b; rows of a, then of c and d

A segment's first child follows it in rows, so a segment and its first child are one range of a path, as is what follows
in the same way: a slice has about as many ranges as leaves. To a backend each is a range of a document that begins at a
position along the path; so windows and chunks count along it. Its keys are a few runs of the tree's rows.

Where they are several they are copied together: 2·G·D elements a key, range and layer, not kept. Many short branches of
a long prefix see far more keys than they have rows, so a call takes ranges of at most `CALL_KEYS` keys, or one range.
Gradients of keys are summed over a slice's ranges before they go to the store, where those of the tree's other slices
wait.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from evenload.attention.range_attention import Gradients, KeyParts, RangeSizes
from evenload.errors import UnsupportedModelError
from evenload.runtime.model.hf_model import StageModel
from evenload.runtime.model.state_calls import StateForm
from evenload.runtime.replay.context_attention import AttentionCall, LocalAttention
from evenload.runtime.replay.store import ActivationStore, CallKey, KeyRows, KeysAndValues, num_rows
from evenload.types.document import Range
from evenload.types.tree import RowRun, Segment, TreeShape

CALL_KEYS = 1 << 16
NO_BALANCE_LOSS = (
    "its load-balancing loss is a product of sums over each sequence, which trees do not keep apart; set "
    "model.router_aux_loss_coef = 0"
)


def refuse_trees(model: StageModel) -> None:
    """Raise an `UnsupportedModelError` where a model cannot train trees of sequences."""
    reason = ""
    if model.router_aux_loss_coef:
        reason = NO_BALANCE_LOSS
    for index, sites in enumerate(model.structure.sites):
        if any(isinstance(call, StateForm) for call in sites.calls):
            reason = f"layer {index} carries a state from token to token, which knows no branches"
        if sites.mixers:
            names = ", ".join(sorted(name or "itself" for name in sites.mixers))
            reason = f"layer {index} mixes tokens in a way of its own ({names}), which knows no branches"
    if reason:
        raise UnsupportedModelError(
            f"the step has trees of sequences that share prefixes, and of {type(model.whole.model).__name__} {reason}"
        )


class _PathRange(NamedTuple):
    """Names rows of the pack that follow each other on a path, their positions, and the rows of the tree that hold the
    keys of all positions up to the last."""

    rows: slice
    positions: Range
    runs: Sequence[RowRun]

    def behind(self, count: int) -> "_PathRange":
        """Return the range without the keys of the first `count` positions."""
        found = []
        for start, stop in self.runs:
            skipped = min(count, stop - start)
            count -= skipped
            if start + skipped < stop:
                found.append(RowRun(start + skipped, stop))
        return self._replace(runs=found)


class _Call(NamedTuple):
    """Describes a call of the backend.

    Args:
        rows: of the pack.
        lying: where the keys of its ranges lie.
        ranges: of each range the number of its slice, and the runs of the document's rows that are its keys.
    """

    rows: slice
    sizes: RangeSizes
    lying: list[KeyRows]
    ranges: list[tuple[int, Sequence[RowRun]]]

    def parts(self, key: CallKey) -> KeyParts:
        found = [rows.of(key) for rows in self.lying]
        if len(found) == 1:
            return found
        keys, values = zip(*found, strict=True)
        return [(torch.cat(keys), torch.cat(values))]


class TreeAttention(LocalAttention):
    """Computes attention of a pack of slices of trees and of plain documents.

    Args:
        trees: the shapes of those of the pack's documents that are trees.
    """

    def __init__(self, ranges: tuple[tuple[slice, Range], ...], trees: Mapping[int, TreeShape]) -> None:
        super().__init__(ranges)
        self._paths = [
            (number, one)
            for number, (rows, r) in enumerate(ranges)
            for one in _path_ranges(rows, r, trees.get(r.doc_id))
        ]
        self._calls: dict[tuple[ActivationStore, int, int], list[_Call]] = {}  # by store, window and chunk

    def attend(self, call: AttentionCall, q: Tensor) -> tuple[Tensor, Tensor]:
        """Return output [T, H, D] and log-sum-exp [T, H] of the pack's q [T, H, D]; keys are recorded."""
        made = [call.forward(q[one.rows], one.parts(call.key), one.sizes) for one in self._calls_of(call)]
        outs, lses = zip(*made, strict=True)
        return made[0] if len(made) == 1 else (torch.cat(outs), torch.cat(lses))

    def gradients(self, call: AttentionCall, grad: Tensor, q: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        """Return the gradients of q [T, H, D], k and v [T, G, D], those of documents summed."""
        calls = self._calls_of(call)
        spans = _spans(range_ for one in calls for range_ in one.ranges)
        sums: dict[int, KeysAndValues] = {}
        dq = torch.empty_like(q)
        for one in calls:
            rows = one.rows
            # Nothing names the copies of keys: the next call makes its own.
            dq[rows], dk, dv = call.backward(grad[rows], q[rows], one.parts(call.key), out[rows], lse[rows], one.sizes)
            sizes = [num_rows(runs) for _, runs in one.ranges]
            for (number, runs), k, v in zip(one.ranges, dk.split(sizes), dv.split(sizes), strict=True):
                sums[number] = _added(sums.get(number), spans[number], runs, (k, v), lse.dtype)
        own_k, own_v = (lse.new_empty(q.shape[0], *one.shape[1:]) for one in sums[0])
        for number, (rows, (doc_id, start, stop)) in enumerate(self.ranges):
            final = call.store.add_key_grads(doc_id, call.key, spans[number].start, *sums[number], start, stop)
            own_k[rows], own_v[rows] = final
        return dq, own_k, own_v

    def _calls_of(self, call: AttentionCall) -> list[_Call]:
        by = call.store, call.scoring.window, call.scoring.chunk
        if by not in self._calls:
            groups: list[list[tuple[int, _PathRange]]] = []
            num_keys = 0
            for number, one in self._paths:
                seen = one.behind(call.first_key(one.positions.start))
                num_keys += num_rows(seen.runs)
                if not groups or num_keys > CALL_KEYS:
                    groups.append([])
                    num_keys = num_rows(seen.runs)
                groups[-1].append((number, seen))
            self._calls[by] = [_call(call, group) for group in groups]
        return self._calls[by]


def _call(call: AttentionCall, group: Sequence[tuple[int, _PathRange]]) -> _Call:
    lying: list[KeyRows] = []
    for _, one in group:
        for start, stop in one.runs:
            keys, last = call.store.document_keys(one.positions.doc_id).part(start, stop), lying[-1] if lying else None
            if last is not None and last.layers is keys.layers and last.stop == keys.start:
                keys = lying.pop()._replace(stop=keys.stop)
            lying.append(keys)
    rows = slice(group[0][1].rows.start, group[-1][1].rows.stop)
    return _Call(rows, call.sizes(one.positions for _, one in group), lying, [(at, one.runs) for at, one in group])


def _spans(ranges: Iterable[tuple[int, Sequence[RowRun]]]) -> dict[int, RowRun]:
    """Return by slice the rows from the first to the last that its ranges see."""
    spans: dict[int, RowRun] = {}
    for number, runs in ranges:
        start, stop = spans.get(number, runs[0])
        spans[number] = RowRun(min(start, *(run.start for run in runs)), max(stop, runs[-1].stop))
    return spans


def _added(
    sums: KeysAndValues | None, span: RowRun, runs: Sequence[RowRun], parts: KeysAndValues, dtype: torch.dtype
) -> KeysAndValues:
    """Add the gradients of the keys that a range sees to those of its slice, which lie by the document's rows `span`;
    None = it is the first one."""
    if sums is None:
        if list(runs) == [span]:
            return parts  # no other range sees the slice's last row
        size = span.stop - span.start
        keys, values = (part.new_zeros((size, *part.shape[1:]), dtype=dtype) for part in parts)
        sums = keys, values
    sizes = [stop - start for start, stop in runs]
    for total, part in zip(sums, parts, strict=True):
        for (start, stop), own in zip(runs, part.split(sizes), strict=True):
            total[start - span.start : stop - span.start] += own
    return sums


def _path_ranges(rows: slice, r: Range, shape: TreeShape | None) -> list[_PathRange]:
    """Divide a slice into ranges of paths, in row order."""
    shape, shift = shape or TreeShape((Segment(r.stop, -1),)), rows.start - r.start
    return [
        _PathRange(slice(own.start + shift, own.stop + shift), Range(r.doc_id, at, at + own.stop - own.start), seen)
        for own, at, seen in shape.path_ranges(r.start, r.stop)
    ]
