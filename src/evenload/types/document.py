"""Define what is trained and how it is cut: `Document`, `Slice`, token ranges, blocks of replicas, and micro-batches
(`MicroPack`, called packs here), which hold slices."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec

from evenload.types.base import Frozen
from evenload.types.tree import Segment, TreePart

# `gc=False`: a step has hundreds of thousands of these, which hold only numbers; looking for cycles took as long as
# planning.


class Document(Frozen, gc=False):
    """One training document of a step, without its tokens.

    Args:
        doc_id: unique within the run's epoch order; stable across resumes.
        num_tokens: at least 1; of a tree, its unique tokens, which are its rows.
        num_label_tokens: positions that carry a loss (plain text: `num_tokens - 1`), each as often as it counts.
        segments: of a tree of sequences that share prefixes, depth first (`types.tree`); () = a plain document.
        num_path_tokens: of a tree, tokens of all its sequences; 0 = `num_tokens`.
        num_recomputed_tokens: of a part of a tree that was too large, tokens that the part before it has, too.
    """

    doc_id: int
    num_tokens: int
    num_label_tokens: int
    segments: tuple[Segment, ...] = ()
    num_path_tokens: int = 0
    num_recomputed_tokens: int = 0

    @property
    def num_shared_tokens(self) -> int:
        """Tokens of its sequences that need no rows of their own."""
        return max(0, self.num_path_tokens - self.num_tokens)


PART_IDS = 2**40
"""Ids of documents are below; part i of a tree d that a step cuts has the id `d + i · PART_IDS`."""


def parts_of(tree: Document, parts: Sequence[TreePart], num_labels: Sequence[int]) -> list[Document]:
    """Return the parts of a tree as documents; `num_labels` are those of its segments."""
    again = [tree.num_recomputed_tokens, *(part.num_recomputed for part in parts[1:])]
    paths = [sum(part.path_lengths) for part in parts[1:]]
    paths.insert(0, tree.num_path_tokens - sum(paths))
    return [
        Document(
            doc_id=tree.doc_id + at * PART_IDS,
            num_tokens=len(part.rows),
            num_label_tokens=sum(num_labels[part.own.start : part.own.stop]),
            segments=part.segments,
            num_path_tokens=paths[at],
            num_recomputed_tokens=again[at],
        )
        for at, part in enumerate(parts)
    ]


class Slice(Frozen, gc=False):
    """Tokens `[start, stop)` of a document; `start` is also the length of its KV prefix.

    Args:
        cp: ranks that share this slice under context parallelism or DP-Merge.
    """

    doc_id: int
    start: int
    stop: int
    cp: int = 1

    @property
    def num_tokens(self) -> int:
        """Tokens in the slice."""
        return self.stop - self.start


class Range(NamedTuple):
    """Tokens `[start, stop)` of a document."""

    doc_id: int
    start: int
    stop: int


class ReplicaBlock(NamedTuple):
    """Replicas `first` to `first + size - 1`; aligned: `first` is a multiple of `size`.

    Blocks of one plan are nested: two that have a replica in common lie one in the other (`plan.dp_merge`).
    """

    first: int
    size: int

    @property
    def replicas(self) -> range:
        """Members, as data-parallel ranks."""
        return range(self.first, self.first + self.size)


Direction = Literal["forward", "backward"]
ActivationPolicy = Literal["replay", "recompute", "offload"]
PackSharding = Literal["", "per_sequence", "per_document"] | tuple[int, ...]
"""Which ranks of a context-parallel group compute a pack: a rule of `stepplan.cp_rows`, or for every slice the rank
that computes it whole, -1 = all of them; "" = no group shares the pack."""


class MicroPack(Frozen):
    """Slices that a stage computes at once (SlimPack §4.1). Forward and backward packs are cut independently.

    Args:
        index: position among the packs of its direction, from 0.
        slices: at most one slice of any document.
        pad_to: every slice is padded to this many tokens (only `padded`; 0 = no padding).
        sharding: how a context-parallel group shares a forward pack; "" where none does, and in backward packs.
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
        """Return `D[j]`, how many forward packs must be done before backward pack j; length m_b."""
        last = {piece.doc_id: pack.index for pack in self.forward for piece in pack.slices}
        return [1 + max(last[piece.doc_id] for piece in pack.slices) for pack in self.backward]
