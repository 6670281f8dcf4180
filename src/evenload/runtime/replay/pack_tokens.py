"""`PackTokens`: a pack as stages compute it."""

from dataclasses import dataclass

from torch import Tensor

from evenload.runtime.replay.context_attention import PackAttention
from evenload.types.token_range import Range


@dataclass(frozen=True, eq=False)
class PackTokens:
    """Token data of a pack, as the first and the last stage need it.

    Args:
        ranges: (doc_id, start, stop) per slice, in row order.
        token_ids, targets, positions: int64[T]; target -100 carries no loss.
        shared: attention, where other ranks have rows of the same slices; None = this rank has them all.
        closes: slices that a backward ends, where they are not the ranges: of every document that this rank holds
            something of.
    """

    ranges: tuple[Range, ...]
    token_ids: Tensor
    targets: Tensor
    positions: Tensor
    shared: PackAttention | None = None
    closes: tuple[Range, ...] | None = None

    @property
    def ended(self) -> tuple[Range, ...]:
        """Slices that a backward ends."""
        return self.ranges if self.closes is None else self.closes
