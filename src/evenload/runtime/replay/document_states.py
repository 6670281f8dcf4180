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

Place = tuple[Hashable, int, int]
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
        self._running: dict[Place, Tensor] = {}
        self._saved: dict[Place, Tensor] = {}
        self._gradients: dict[Place, Tensor] = {}
        self._begun: list[tuple[Place, Tensor]] = []

    # ---- forward -------------------------------------------------------------------------------

    def forward(
        self, key: Hashable, call: StateCall, ranges: Sequence[Range], given: Sequence[Tensor | None] = ()
    ) -> Tensor:
        """Compute a call of the running forward pack, whose rows are of these ranges. The first ones, of states
        before them that are `given`, are of documents that ranks share: what is behind these ranges is not kept."""
        for (doc_id, start, _), state in zip(ranges, given, strict=False):
            if state is not None:
                self.arrive((key, doc_id, start), state)
        last_tokens = [r.stop if at < len(given) else self._num_tokens[r.doc_id] for at, r in enumerate(ranges)]
        rounds = self._rounds(ranges)
        output: Tensor | None = None
        for pieces in rounds:
            spans = _spans(
                [piece for _, _, piece in pieces],
                [self._enter((key, doc_id, at)) for _, _, (doc_id, at, _) in pieces],
                [last_tokens[at] for at, _, _ in pieces],
            )
            if len(rounds) == 1:
                output, ends = call.over(spans)
            else:
                firsts = [row for _, row, _ in pieces]
                some, ends = call.over_some(firsts, spans)
                output = _scatter(some, firsts, spans.sizes, call, output)
            for (_, _, (doc_id, _, stop)), end in zip(pieces, ends, strict=True):
                if end is not None:
                    self._leave((key, doc_id, stop), end)
        assert output is not None
        return output

    def _rounds(self, ranges: Sequence[Range]) -> list[list[tuple[int, int, Range]]]:
        """Cut ranges where backwards begin; return first all first pieces with the numbers of their ranges and their
        first rows, then all second ones, as a piece needs the state behind the one before."""
        rounds: list[list[tuple[int, int, Range]]] = []
        row = 0
        for at, (doc_id, start, stop) in enumerate(ranges):
            edges = [start, *(cut for cut in self._cuts.get(doc_id, ()) if start < cut < stop), stop]
            for turn, (first, last) in enumerate(pairwise(edges)):
                if turn == len(rounds):
                    rounds.append([])
                rounds[turn].append((at, row, Range(doc_id, first, last)))
                row += last - first
        return rounds

    def _enter(self, place: Place) -> Tensor | None:
        """Return the state at a token where a piece begins; keep it where a backward begins, too."""
        _, doc_id, start = place
        if not start:
            return None
        if start not in self._cuts.get(doc_id, ()):
            return self.take(place)
        state = self._saved[place] = self._running.pop(place)
        return state

    def _leave(self, place: Place, end: Tensor) -> None:
        # A copy: the end of a convolution's input would keep all of it.
        self.arrive(place, end.clone())

    def arrive(self, place: Place, state: Tensor) -> None:
        """Keep the state before a token, from which a forward range begins."""
        self._running[place] = state
        self._held.count("states", state.nbytes)

    def take(self, place: Place) -> Tensor:
        """Return the state before a token, which is kept no longer."""
        state = self._running.pop(place)
        self._held.count("states", -state.nbytes)
        return state

    # ---- backward ------------------------------------------------------------------------------

    def backward(self, key: Hashable, call: StateCall, ranges: Sequence[Range]) -> Tensor:
        """Compute a call of the running backward pack again, for autograd, which also gets the gradients of the states
        behind its ranges. `end_backward` collects those before them."""
        _, output, ends = self.again(key, call, ranges)
        followed = self.followed(key, ranges, ends)
        if not followed:
            return output
        states, gradients = zip(*followed, strict=True)
        return known_output(output.detach(), lambda grad: (grad, *gradients), output, *states)

    def again(
        self, key: Hashable, call: StateCall, ranges: Sequence[Range], shared_tokens: Sequence[int] = ()
    ) -> tuple[list[Tensor | None], Tensor, list[Tensor | None]]:
        """Compute a call of the running backward pack again; return the states before its ranges, the output and the
        states behind them. The first ranges are of documents of so many tokens that ranks share: states before these
        are kept no longer."""
        starts: list[Tensor | None] = []
        for at, (doc_id, start, _) in enumerate(ranges):
            state = None
            if start:
                place = key, doc_id, start
                state = self._saved_state(place).detach().requires_grad_()
                if at < len(shared_tokens):
                    del self._saved[place]
                    self._held.count("states", -state.nbytes)
                else:
                    self._begun.append((place, state))
            starts.append(state)
        own_tokens = [self._num_tokens[doc_id] for doc_id, _, _ in ranges[len(shared_tokens) :]]
        output, ends = call.over(_spans(ranges, starts, [*shared_tokens, *own_tokens]))
        return starts, output, ends

    def followed(
        self, key: Hashable, ranges: Sequence[Range], ends: Sequence[Tensor | None]
    ) -> list[tuple[Tensor, Tensor]]:
        """Return states behind ranges that are not the last of their documents, with their gradients."""
        return [
            (end, self.take_gradient((key, doc_id, stop)))
            for (doc_id, _, stop), end in zip(ranges, ends, strict=True)
            if end is not None
        ]

    def _saved_state(self, place: Place) -> Tensor:
        return self._saved[place]

    def arrive_gradient(self, place: Place, gradient: Tensor) -> None:
        """Keep the gradient of the state before a token, for the backward that ends there."""
        self._gradients[place] = gradient
        self._held.count("states", gradient.nbytes)

    def take_gradient(self, place: Place) -> Tensor:
        """Return the gradient of the state before a token, which is kept no longer."""
        gradient = self._gradients.pop(place)
        self._held.count("states", -gradient.nbytes)
        return gradient

    def end_backward(self) -> None:
        """Leave the gradients of the states from which the layers that autograd has just passed began."""
        for place, state in self._begun:
            del self._saved[place]
            # No gradient: nothing that the range computes reads the state.
            # Counted as the state that it takes the place of.
            self._gradients[place] = torch.zeros_like(state) if state.grad is None else state.grad
        self._begun.clear()

    def unfinished(self) -> set[int]:
        """Return documents of which a state is left."""
        return {place[1] for kept in (self._running, self._saved, self._gradients) for place in kept}


def _spans(ranges: Sequence[Range], starts: Sequence[Tensor | None], last_tokens: Sequence[int]) -> Spans:
    """Describe ranges of which the states behind are wanted before these tokens."""
    wanted = [stop < last for (_, _, stop), last in zip(ranges, last_tokens, strict=True)]
    return Spans([stop - start for _, start, stop in ranges], starts, wanted)


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
