"""`MicroPack` and `PackPlan`: the units that travel through a pipeline.

A MicroPack is a list of slices that one stage computes in one go (SlimPack §4.1). Forward and
backward have their own MicroPacks; only whole documents tie them together.
"""

from typing import Literal

import msgspec

from evenload.types.base import Frozen
from evenload.types.document import Slice

Direction = Literal["forward", "backward"]
ActivationPolicy = Literal["replay", "recompute", "offload"]
PackSharding = Literal["", "per_sequence", "per_document"] | tuple[int, ...]
"""Which ranks of a context-parallel group compute a pack: a rule of `stepplan.rank_rows`, or for every slice the rank
that computes it whole, -1 = all of them; "" = no group shares the pack."""


class MicroPack(Frozen):
    """Slices computed together.

    Args:
        index: position among the packs of its direction, from 0.
        slices: at most one slice of any document.
        pad_to: every slice is padded to this many tokens (only `padded`; 0 = no padding).
        sharding: how a context-parallel group shares a forward pack; "" where none does, and in backward packs: a token
            runs backward on the rank on which it ran forward.
        cost_s: predicted seconds on the slowest stage.
    """

    index: int
    direction: Direction
    slices: tuple[Slice, ...]
    pad_to: int = 0
    sharding: PackSharding = ""
    cost_s: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Real tokens."""
        return sum(piece.stop - piece.start for piece in self.slices)

    @property
    def num_padding_tokens(self) -> int:
        """Tokens computed for nothing."""
        return self.pad_to * len(self.slices) - self.num_tokens if self.pad_to else 0


class PackPlan(Frozen):
    """The packs of one data-parallel replica.

    Args:
        forward: documents ascend, slices of a document ascend.
        backward: documents in the same order, slices of a document descend (FILO).
        policies: activation policy of documents that do not use `replay`.
    """

    dp_rank: int
    forward: tuple[MicroPack, ...]
    backward: tuple[MicroPack, ...]
    policies: dict[int, ActivationPolicy] = msgspec.field(default_factory=dict)

    def forwards_needed(self) -> list[int]:
        """`D[j]`: forward packs that must be done before backward pack j. Length m_b."""
        last = {piece.doc_id: pack.index for pack in self.forward for piece in pack.slices}
        return [1 + max(last[piece.doc_id] for piece in pack.slices) for pack in self.backward]
