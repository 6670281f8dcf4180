"""`DocumentStates` keeps the states of documents under way in layers that carry one (`runtime/model/state_calls.py`).

    forward    a range begins from the state that the range before it left, and stops at every cut that a backward will
               begin at, where the state is saved
    backward   a range runs again from its saved state, under autograd of the family's own function; the gradient of the
               state behind it comes from the range after it, which ran before, and that of the state before it is left

A document that is one range in both directions keeps nothing. Saved states and gradients are as large as each other, so
after all forwards a document holds as many as it has cuts in backward, and each backward but the last gives one back.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from evenload.runtime.model.state_calls import Spans, StateCall
from evenload.runtime.replay.held_bytes import HeldBytes
from evenload.runtime.replay.weight_products import known_output
from evenload.types.document import Range

_Place = tuple[Hashable, int, int]
"""A call of a layer, a document, and one of its tokens."""


class DocumentStates:
    """Keeps the states of one stage during one step.

    Args:
        num_tokens: stored tokens of every document, padding included.
        backward_packs: ranges of all backward packs.
        held: where bytes are counted.
    """

    def __init__(
        self, num_tokens: Mapping[int, int], backward_packs: Iterable[Iterable[Range]], held: HeldBytes
    ) -> None:
        self._num_tokens, self._held = num_tokens, held
        self._cuts: dict[int, list[int]] = defaultdict(list)
        for pack in backward_packs:
            for doc_id, start, _ in pack:
                if start:
                    self._cuts[doc_id].append(start)
        for cuts in self._cuts.values():
            cuts.sort()
        self._running: dict[_Place, Tensor] = {}
        self._saved: dict[_Place, Tensor] = {}
        self._gradients: dict[_Place, Tensor] = {}
        self._begun: list[tuple[_Place, Tensor]] = []

    # ---- forward -------------------------------------------------------------------------------

    def forward(self, key: Hashable, call: StateCall, ranges: Sequence[Range]) -> Tensor:
        """Compute a call of the running forward pack, whose rows are of these ranges."""
        rounds = self._rounds(ranges)
        output: Tensor | None = None
        for pieces in rounds:
            spans = self._spans(
                [piece for _, piece in pieces], [self._enter((key, doc_id, at)) for _, (doc_id, at, _) in pieces]
            )
            if len(rounds) == 1:
                output, ends = call.over(spans)
            else:
                firsts = [row for row, _ in pieces]
                some, ends = call.over_some(firsts, spans)
                output = _scatter(some, firsts, spans.sizes, call, output)
            for (_, (doc_id, _, stop)), end in zip(pieces, ends, strict=True):
                if end is not None:
                    self._leave((key, doc_id, stop), end)
        assert output is not None
        return output

    def _spans(self, ranges: Sequence[Range], starts: Sequence[Tensor | None]) -> Spans:
        wanted = [stop < self._num_tokens[doc_id] for doc_id, _, stop in ranges]
        return Spans([stop - start for _, start, stop in ranges], starts, wanted)

    def _rounds(self, ranges: Sequence[Range]) -> list[list[tuple[int, Range]]]:
        """Cut ranges where backwards begin; return first all first pieces with their first rows, then all second ones,
        as a piece needs the state behind the one before."""
        rounds: list[list[tuple[int, Range]]] = []
        row = 0
        for doc_id, start, stop in ranges:
            edges = [start, *(cut for cut in self._cuts.get(doc_id, ()) if start < cut < stop), stop]
            for turn, (first, last) in enumerate(pairwise(edges)):
                if turn == len(rounds):
                    rounds.append([])
                rounds[turn].append((row, Range(doc_id, first, last)))
                row += last - first
        return rounds

    def _enter(self, place: _Place) -> Tensor | None:
        """Return the state at a token where a piece begins; keep it where a backward begins, too."""
        _, doc_id, start = place
        if not start:
            return None
        state = self._running.pop(place)
        if start in self._cuts.get(doc_id, ()):
            self._saved[place] = state
        else:
            self._held.count("states", -state.nbytes)
        return state

    def _leave(self, place: _Place, end: Tensor) -> None:
        # A copy: the end of a convolution's input would keep all of it.
        self._running[place] = end = end.clone()
        self._held.count("states", end.nbytes)

    # ---- backward ------------------------------------------------------------------------------

    def backward(self, key: Hashable, call: StateCall, ranges: Sequence[Range]) -> Tensor:
        """Compute a call of the running backward pack again, for autograd, which also gets the gradients of the states
        behind its ranges. `end_backward` collects those before them."""
        starts: list[Tensor | None] = []
        for doc_id, start, _ in ranges:
            state = None
            if start:
                state = self._saved_state((key, doc_id, start)).detach().requires_grad_()
                self._begun.append(((key, doc_id, start), state))
            starts.append(state)
        output, ends = call.over(self._spans(ranges, starts))
        followed = [
            (end, self._take_gradient((key, doc_id, stop)))
            for (doc_id, _, stop), end in zip(ranges, ends, strict=True)
            if end is not None
        ]
        if not followed:
            return output
        states, gradients = zip(*followed, strict=True)
        return known_output(output.detach(), lambda grad: (grad, *gradients), output, *states)

    def _saved_state(self, place: _Place) -> Tensor:
        return self._saved[place]

    def _take_gradient(self, place: _Place) -> Tensor:
        gradient = self._gradients.pop(place)
        self._held.count("states", -gradient.nbytes)
        return gradient

    def end_backward(self) -> None:
        """Leave the gradients of the states from which the layers that autograd has just passed began."""
        for place, state in self._begun:
            del self._saved[place]
            # No gradient: nothing that the range computes reads the state.
            self._gradients[place] = torch.zeros_like(state) if state.grad is None else state.grad
        self._begun.clear()

    def unfinished(self) -> set[int]:
        """Return documents of which a state is left."""
        return {place[1] for kept in (self._running, self._saved, self._gradients) for place in kept}


def _scatter(
    some: Tensor, firsts: Sequence[int], sizes: Sequence[int], call: StateCall, output: Tensor | None
) -> Tensor:
    """Put rows of spans into their places among all rows of a call."""
    dim = call.out_dim
    if output is None:
        output = some.new_empty(*some.shape[:dim], call.num_rows, *some.shape[dim + 1 :])
    for first, rows in zip(firsts, some.split(list(sizes), dim), strict=True):
        output.narrow(dim, first, rows.shape[dim]).copy_(rows)
    return output
