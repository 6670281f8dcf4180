"""`PackTokens`: a pack as stages compute it."""

from dataclasses import dataclass

from torch import Tensor

from evenload.runtime.replay.context_attention import PackAttention
from evenload.types.token_range import Range, divide_ranges


@dataclass(frozen=True, eq=False)
class PackTokens:
    """Token data of a pack, as the first and the last stage need it.

    Args:
        ranges: (doc_id, start, stop) per slice, in row order.
        token_ids, targets, positions: int64[T]; target -100 carries no loss.
        shared: attention, where other ranks have rows of the same slices; None = this rank has them all.
        closes: slices that a backward ends, where they are not the ranges: of every document that this rank holds
            something of.
        slices: of the whole pack, where this is half of one; of halves that ranges are cut by, those that they cut.
        first_rows: own ones of two halves that compute by turns (`MicroPack.first_rows`); 0 = in one go.
    """

    ranges: tuple[Range, ...]
    token_ids: Tensor
    targets: Tensor
    positions: Tensor
    shared: PackAttention | None = None
    closes: tuple[Range, ...] | None = None
    first_rows: int = 0
    slices: tuple[Range, ...] = ()

    def halves(self) -> tuple["PackTokens", "PackTokens"]:
        """The first rows and the others; one document may have rows in both."""
        at = self.first_rows
        first, second = divide_ranges(self.ranges, at)
        attention = (None, None) if self.shared is None else self.shared.halves
        assert len(attention) == 2, "who shares a pack in halves attends in halves"
        return (
            self._part(first, slice(0, at), attention[0]),
            self._part(second, slice(at, None), attention[1]),
        )

    @property
    def ended(self) -> tuple[Range, ...]:
        """Slices that a backward ends."""
        return self.ranges if self.closes is None else self.closes

    def cut_by_halves(self) -> tuple[Range, ...]:
        """Slices of which both halves may have rows, of this rank or of others that share the pack."""
        return self.ended if self.first_rows or (self.shared is not None and self.shared.halves) else ()

    def ranges_in_turn(self) -> tuple[tuple[Range, ...], ...]:
        """Of what a backward runs by itself, in its order: of both halves, last rows first, or of the whole pack."""
        return divide_ranges(self.ranges, self.first_rows)[::-1] if self.first_rows else (self.ranges,)

    def _part(self, ranges: tuple[Range, ...], rows: slice, shared: PackAttention | None) -> "PackTokens":
        columns = (self.token_ids[rows], self.targets[rows], self.positions[rows])
        return PackTokens(ranges, *columns, shared=shared, slices=self.slices or self.ranges)
