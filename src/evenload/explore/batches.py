"""Sample global batches from a table of lengths, for planning without data (`evenload plan`).

The table is shuffled by seed, again at its end, so step k is the same for any number of steps. O(n) per step.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from evenload.data.config import Overlong
from evenload.data.lengths import TreeLengths
from evenload.errors import ConfigError, DataError
from evenload.planning.deferral import DelayState
from evenload.planning.planner import Proposal, StepPlanner
from evenload.planning.tree_runs import in_parts
from evenload.types.document import Document
from evenload.types.plan import DEFERRED, LeftOut

NO_TREES: Mapping[int, TreeLengths] = {}


@dataclass(frozen=True)
class SampledBatch:
    """One step's documents in arrival order, and those left out; ids count up over the run. `alone` are the same with
    every sequence of a tree as a document of its own."""

    documents: tuple[Document, ...]
    left_out: tuple[LeftOut, ...]
    dropped_tokens: int
    alone: tuple[Document, ...] = ()


@dataclass(frozen=True, kw_only=True)
class BatchRule:
    """How a global batch is drawn from entries of a table.

    Args:
        num_documents: table entries of a step; or
        num_tokens: entries are taken until their tokens (after `overlong`) reach this.
        context: longest document that is trained whole.
        overlong: longer ones are refused, cut into independent documents, cut off, or left out.

    Raises:
        ConfigError: neither or both of `num_documents` and `num_tokens`, a value below 1, or an unknown `overlong`.
    """

    num_documents: int | None = None
    num_tokens: int | None = None
    context: int
    overlong: Overlong = "error"

    def __post_init__(self) -> None:
        if (self.num_documents is None) == (self.num_tokens is None):
            raise ConfigError("global batch: give its size either in documents or in tokens")
        if self.overlong not in (choices := get_args(Overlong)):
            raise ConfigError(f"overlong is '{self.overlong}'; choices: {', '.join(choices)}")
        size = self.num_tokens if self.num_documents is None else self.num_documents
        for name, value in (("batch size", size), ("context", self.context)):
            if value is None or value < 1:
                raise ConfigError(f"global batch: {name} is {value}, must be at least 1")

    def sample(
        self, lengths: NDArray[np.int64], *, steps: int, seed: int, trees: Mapping[int, TreeLengths] = NO_TREES
    ) -> tuple[SampledBatch, ...]:
        """Sample the batches of so many steps from int64[n] lengths of at least 1, and the trees among them, by place.

        Raises:
            ConfigError: `steps` below 1 or `seed` below 0.
            DataError: an entry longer than `context` with `overlong` "error"; a table without usable entries.
        """
        if steps < 1:
            raise ConfigError(f"global batch: steps is {steps}, must be at least 1")
        if seed < 0:
            raise ConfigError(f"global batch: seed is {seed}, must be 0 or more")
        self._require_usable(np.delete(lengths, [*trees]) if trees else lengths, len(trees))
        order = _order(len(lengths), seed)
        batches: list[SampledBatch] = []
        next_id = 0
        for _ in range(steps):
            batches.append(self.draw(lengths, order, next_id, trees))
            next_id += len(batches[-1].documents) + len(batches[-1].left_out)
        return tuple(batches)

    def draw(
        self,
        lengths: NDArray[np.int64],
        order: Iterator[int],
        first_id: int = 0,
        trees: Mapping[int, TreeLengths] = NO_TREES,
    ) -> SampledBatch:
        """Draw a batch of the entries at the places that an endless iterator gives; ids of documents count up from
        `first_id`."""
        documents: list[Document] = []
        sequences: list[int] = []
        left_out: list[LeftOut] = []
        sampled = tokens = dropped = 0
        ids = itertools.count(first_id)
        while sampled < self.num_documents if self.num_documents is not None else tokens < self.num_tokens:  # type: ignore[operator]
            at = next(order)
            length, tree = int(lengths[at]), trees.get(at)
            sampled += 1
            if tree is not None:
                documents.append(_tree_document(next(ids), length, tree))
                sequences += tree.sequences
                dropped += tree.num_dropped
                tokens += length
                continue
            if length > self.context and self.overlong == "drop":
                reason = f"dropped: longer than {self.context}"
                left_out.append(LeftOut(doc_id=next(ids), num_tokens=length, reason=reason))
                dropped += length
                continue
            pieces = _pieces(length, self.context, self.overlong)
            dropped += length - sum(pieces)
            documents += _plain_documents(ids, pieces)
            sequences += pieces
            tokens += sum(pieces)
        alone = tuple(_plain_documents(itertools.count(first_id), sequences)) if trees else ()
        return SampledBatch(tuple(documents), tuple(left_out), dropped, alone)

    def _require_usable(self, lengths: NDArray[np.int64], num_trees: int) -> None:
        usable = lengths <= self.context
        if self.overlong == "error" and not usable.all():
            first = int(np.argmin(usable))
            raise DataError(
                f"document {first} has {lengths[first]} tokens, context is {self.context} "
                f"({int((~usable).sum())} of {len(lengths)} documents are longer); "
                "raise --context or choose --overlong split, truncate or drop"
            )
        if not num_trees and (not len(lengths) or (self.overlong == "drop" and not usable.any())):
            raise DataError(
                f"no document of the table fits context {self.context}; raise --context or use --overlong split"
            )


def _order(num_entries: int, seed: int) -> Iterator[int]:
    generator = np.random.default_rng(seed)
    while True:
        yield from generator.permutation(num_entries).tolist()


def _plain_documents(ids: Iterator[int], lengths: Sequence[int]) -> Iterator[Document]:
    return (Document(doc_id=next(ids), num_tokens=n, num_label_tokens=n - 1) for n in lengths)


def _tree_document(doc_id: int, num_tokens: int, tree: TreeLengths) -> Document:
    """Return a tree whose every token is a label of each of its sequences."""
    return Document(
        doc_id=doc_id,
        num_tokens=num_tokens,
        num_label_tokens=sum(tree.sequences) - len(tree.sequences),
        segments=tree.segments,
        num_path_tokens=sum(tree.sequences),
        num_recomputed_tokens=tree.num_recomputed,
    )


def _pieces(length: int, context: int, overlong: Overlong) -> list[int]:
    if length <= context:
        return [length]
    if overlong == "truncate":
        return [context]
    whole, rest = divmod(length, context)
    return [context] * whole + ([rest] if rest else [])


OnProgress = Callable[[int, int, str], None]
"""(done, of how many, what comes next)."""


def no_progress(done: int, total: int, what: str) -> None:
    """Ignore progress."""


def plan_steps(
    planner: StepPlanner, batches: Sequence[SampledBatch], name: str
) -> tuple[list[Proposal], list[float], int]:
    """Plan every step in one layout, as a run does: large trees in parts. Return the proposals, the seconds that each
    took, and the tokens deferred. Raises as `StepPlanner.propose`."""
    proposals: list[Proposal] = []
    plan_time_s: list[float] = []
    state, carried, deferred_tokens = DelayState(), (), 0
    for step, batch in enumerate(batches):
        documents: tuple[Document, ...] = (*carried, *in_parts(batch.documents, planner.costs))
        is_last = step == len(batches) - 1
        started = time.perf_counter()
        proposal = planner.propose(step, documents, name, batch.left_out, state=state, is_last=is_last)
        plan_time_s.append(time.perf_counter() - started)
        proposals.append(proposal)
        state = proposal.state or DelayState()
        deferred = {left.doc_id for left in proposal.plan.left_out if left.reason == DEFERRED}
        deferred_tokens += sum(document.num_tokens for document in batch.documents if document.doc_id in deferred)
        carried = tuple(document for document in documents if document.doc_id in deferred)
    return proposals, plan_time_s, deferred_tokens
