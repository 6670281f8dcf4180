"""`BetweenHalves`: what two halves of a shared pack leave each other of a document that only they cut.

Of a document that is cut anyway every rank keeps all keys and sums gradients in the store. Of one that only halves cut
nobody keeps more than in one go: gathered keys, and gradients that one half's rows give the other's keys, are there for
a layer. Bytes of attention's workspace, which are priced by the whole pack (`cost.memory`).

    forward    the first half leaves its gathered keys and values, which the second's are put behind
    backward   the second half gathers those of the whole document again and leaves them, with gradients of the first's
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from evenload.stepplan.rank_rows import SharedSlice


class _Key(NamedTuple):
    """A part of a document's key heads on one layer, by its first one."""

    layer: int
    doc_id: int
    head: int


class BetweenHalves:
    """Of one pack; empty once both halves have run."""

    def __init__(self) -> None:
        self._keys: dict[_Key, tuple[Tensor, Tensor]] = {}
        self._grads: dict[_Key, tuple[Tensor, Tensor]] = {}

    def join(self, layer: int, head: int, piece: SharedSlice, new: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """In forward: K and V [n, g, D] of a half's slice -> those of the document up to its end."""
        key = _Key(layer, piece.document.doc_id, head)
        tokens = piece.document.num_tokens
        k, v = self._keys.pop(key) if piece.start else (one.new_empty((tokens, *one.shape[1:])) for one in new)
        for all_tokens, of_piece in zip((k, v), new, strict=True):
            all_tokens[piece.start : piece.stop] = of_piece
        if piece.start == 0:
            self._keys[key] = k, v
        return k[: piece.stop], v[: piece.stop]

    def leave_keys(self, layer: int, head: int, piece: SharedSlice, keys: Tensor, values: Tensor) -> None:
        """In backward, of the second half: K and V of the whole document."""
        self._keys[_Key(layer, piece.document.doc_id, head)] = keys, values

    def take_keys(self, layer: int, head: int, piece: SharedSlice) -> tuple[Tensor, Tensor]:
        """In backward, of the first half: what was left."""
        return self._keys.pop(_Key(layer, piece.document.doc_id, head))

    def sum(
        self, layer: int, head: int, piece: SharedSlice, first: int, grad_k: Tensor, grad_v: Tensor
    ) -> tuple[Tensor, Tensor]:
        """In backward: a half's gradients of K and V of tokens `[first, stop)` -> the now final ones of its slice."""
        key = _Key(layer, piece.document.doc_id, head)
        if piece.start:
            at = piece.start - first
            self._grads[key] = grad_k[:at], grad_v[:at]
            return grad_k[at:], grad_v[at:]
        for mine, left in zip((grad_k, grad_v), self._grads.pop(key), strict=True):
            mine[len(mine) - len(left) :] += left  # of the tokens before the other half that its window reaches
        return grad_k, grad_v
