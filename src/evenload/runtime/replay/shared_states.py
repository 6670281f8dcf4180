"""`SharedStates` carries states through one pack of documents that ranks share (`parallel.cp`, DP-Merge).

Behind a range the state is M · start + U, where M and U depend on the rows of the range alone
(`runtime/model/state_calls.py`), so ranks need of each other's ranges M and U, and no row:

    forward    M, and U from a state of zeros, of own ranges ─► all-gather ─► the states before all ranges of a slice,
               one after the other from that before the slice ─► own ranges from theirs, with local documents
    backward   when the gradient of the output arrives: L, the part of it that goes to the states before own ranges, by
               autograd, and M ─► all-gather ─► the gradients of the states behind all ranges, from that behind the
               slice, by Mᵀ · gradient + L ─► own ranges, with local documents

The states from which own ranges begin in backward are kept from forward, so backward has one transfer, too. The state
behind a slice, or the gradient of that before it, is kept by every rank of the group. What travels has the precision of
sums, of every rank as many ranges as the fullest has. Price: (ranks - 1) · ranges · (elements of M + of the state)
received a call and direction, whatever the tokens; own ranges run twice forward and M once in each direction, and L is
a second backward of the function as to its state.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from evenload.attention.range_attention import work_dtype
from evenload.runtime.comm.collectives import ContextGroup
from evenload.runtime.model.state_calls import Spans, StateCall, StateForm
from evenload.runtime.replay.document_states import DocumentStates
from evenload.runtime.replay.weight_products import known_output
from evenload.stepplan.cp_rows import PackRows, SharedSlice
from evenload.types.document import Direction, Range

_Parts = Sequence[tuple[Tensor, Tensor]]
"""Of every own range M, and U or L."""


class _Turn(NamedTuple):
    """A range of a slice: its tokens, its row among what is gathered, and which of this rank's it is, if it is one."""

    num_tokens: int
    row: int
    own: int | None


class SharedStates:
    """Carries the states of one rank's rows of a shared pack; `ranges` of its methods are those rows, the shared slices
    first, as in `PackRows.ranges`."""

    def __init__(self, rows: PackRows, group: ContextGroup, label: str) -> None:
        self._group, self._label = group, label
        counts = [0] * group.size
        self._own: list[Range] = []
        self._num_tokens: list[int] = []
        """Of the document of every own range."""
        turns: list[list[tuple[int, int, int, int]]] = []
        for piece in rows.shared:
            of_slice = []
            for rank, ranges in enumerate(piece.ranges):
                for _, start, stop in ranges:
                    of_slice.append((start, stop, rank, counts[rank]))
                    counts[rank] += 1
            self._own += piece.ranges[group.rank]
            self._num_tokens += [piece.document.num_tokens] * len(piece.ranges[group.rank])
            turns.append(sorted(of_slice))
        self._padded = max(counts)
        self._slices: list[tuple[SharedSlice, list[_Turn]]] = [
            (
                piece,
                [
                    _Turn(stop - start, rank * self._padded + at, at if rank == group.rank else None)
                    for start, stop, rank, at in of_slice
                ],
            )
            for piece, of_slice in zip(rows.shared, turns, strict=True)
        ]
        self._sizes = [stop - start for _, start, stop in self._own]
        self._firsts = [0, *accumulate(self._sizes)][: len(self._sizes)]
        """Own ranges' tokens and first rows."""

    def forward(self, states: DocumentStates, key: tuple[int, int], call: StateCall, ranges: Sequence[Range]) -> Tensor:
        """Compute a call of the running forward pack. Collective."""
        parts: _Parts = []
        like, _ = call.rows[0]
        if self._own:
            count = len(self._own)
            _, found = call.over_some(self._firsts, Spans(self._sizes, [None] * count, [True] * count))
            ends = [end for end in found if end is not None]
            parts = [*zip(call.transitions(self._firsts, self._sizes), ends, strict=True)]
            like = ends[0]
        return states.forward(key, call, ranges, self._starts(states, key, call.form, parts, like))

    def backward(
        self, states: DocumentStates, key: tuple[int, int], call: StateCall, ranges: Sequence[Range]
    ) -> Tensor:
        """Compute a call of the running backward pack again, for autograd. Collective, as is its backward."""
        num_shared = len(self._own)
        starts, output, ends = states.again(key, call, ranges, self._num_tokens)
        local = states.followed(key, ranges[num_shared:], ends[num_shared:])
        transitions = call.transitions(self._firsts, self._sizes) if self._own else []
        behind = {at: end for at, end in enumerate(ends[:num_shared]) if end is not None}
        like, _ = call.rows[0]

        def backward(grad: Tensor) -> tuple[Tensor, ...]:
            parts = [*zip(transitions, _of_starts(output, starts[:num_shared], grad, call.form), strict=True)]
            gradients = self._gradients(states, key, call.form, parts, like)
            shared = (gradients[at].to(end.dtype) for at, end in behind.items())
            return grad, *shared, *(gradient for _, gradient in local)

        return known_output(output.detach(), backward, output, *behind.values(), *(end for end, _ in local))

    def join(
        self, direction: Direction, states: DocumentStates, key: tuple[int, int], form: StateForm, like: Tensor
    ) -> None:
        """Take part in the transfer of a call where this rank has no rows. Collective."""
        if direction == "forward":
            self._starts(states, key, form, (), like)
        else:
            self._gradients(states, key, form, (), like)

    def _starts(
        self, states: DocumentStates, key: tuple[int, int], form: StateForm, parts: _Parts, like: Tensor
    ) -> list[Tensor | None]:
        """Return the states before own ranges, in the precision of `like`; leave those behind slices. None = a document
        begins."""
        gathered = self._gather(f"the states of {self._label} (layer {key[0]})", form, parts, like)
        starts: list[Tensor | None] = [None] * len(self._own)
        for piece, turns in self._slices:
            place = key, piece.document.doc_id
            state = states.take((*place, piece.start)) if piece.start else gathered.new_zeros(form.state)
            for num_tokens, row, own in turns:
                if own is not None and self._own[own].start:
                    starts[own] = state.to(like.dtype)
                transition, end = _divided(form, gathered[row])
                state = form.apply(transition, state, num_tokens) + end
            if piece.stop < piece.document.num_tokens:
                states.arrive((*place, piece.stop), state)
        return starts

    def _gradients(
        self, states: DocumentStates, key: tuple[int, int], form: StateForm, parts: _Parts, like: Tensor
    ) -> list[Tensor]:
        """Return the gradients of the states behind own ranges; leave those of the states before slices."""
        gathered = self._gather(f"the gradients of the states of {self._label} (layer {key[0]})", form, parts, like)
        found: dict[int, Tensor] = {}
        for piece, turns in self._slices:
            place = key, piece.document.doc_id
            is_last = piece.stop == piece.document.num_tokens
            gradient = gathered.new_zeros(form.state) if is_last else states.take_gradient((*place, piece.stop))
            for num_tokens, row, own in reversed(turns):
                if own is not None:
                    found[own] = gradient
                transition, of_start = _divided(form, gathered[row])
                gradient = form.adjoint(transition, gradient, num_tokens) + of_start
            if piece.start:
                states.arrive_gradient((*place, piece.start), gradient)
        return [found[own] for own in range(len(self._own))]

    def _gather(self, what: str, form: StateForm, parts: _Parts, like: Tensor) -> Tensor:
        """Return M and U, or L, of all ranks' ranges, [ranks · ranges, elements]."""
        mine = torch.zeros(self._padded, sum(form.sizes), dtype=work_dtype(like), device=like.device)
        for row, part in zip(mine, parts, strict=False):
            torch.cat([one.detach().flatten().to(mine.dtype) for one in part], out=row)
        return self._group.all_gather(mine, what).wait()


def _divided(form: StateForm, row: Tensor) -> tuple[Tensor, Tensor]:
    transition, state = row.split(form.sizes)
    return transition.view(form.transition), state.view(form.state)


def _of_starts(output: Tensor, starts: Sequence[Tensor | None], grad: Tensor, form: StateForm) -> list[Tensor]:
    """Return what a gradient of the output gives the states before ranges; nothing where a document begins."""
    begun = [start for start in starts if start is not None]
    # The graph is needed again, for the gradients of rows.
    found = iter(torch.autograd.grad(output, begun, grad, retain_graph=True, allow_unused=True) if begun else ())
    gradients = [None if start is None else next(found) for start in starts]
    return [grad.new_zeros(form.state) if one is None else one for one in gradients]
