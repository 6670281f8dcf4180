"""Global batches sampled from a table of lengths, for planning without data (`evenload plan`).

The table is shuffled by seed and read on; when it ends it is shuffled anew. So a step never repeats a table
entry before all were used, and step k is the same for any number of steps. A batch is fixed before planning,
by documents or by tokens; strategies only rearrange inside it. O(n) per step.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from evenload.errors import ConfigError, DataError
from evenload.types.document import Document
from evenload.types.plan import LeftOut

Overlong = Literal["error", "split", "truncate", "drop"]


@dataclass(frozen=True)
class SampledBatch:
    """One step's documents in arrival order, and what became of the others; ids count up over the run."""

    documents: tuple[Document, ...]
    left_out: tuple[LeftOut, ...]
    dropped_tokens: int


def sample_global_batches(
    lengths: NDArray[np.int64],
    *,
    steps: int,
    seed: int,
    num_documents: int | None = None,
    num_tokens: int | None = None,
    context: int,
    overlong: Overlong = "error",
) -> tuple[SampledBatch, ...]:
    """Draw the batches of `steps` steps.

    Args:
        lengths: int64[n], at least 1 each.
        num_documents: table entries of a step; or
        num_tokens: entries are taken until their tokens (after `overlong`) reach this; the last one may exceed it.
        context: longest document that is trained whole.
        overlong: what happens to longer ones: refuse, cut into independent documents, cut off, or leave out.

    Raises:
        ConfigError: neither or both of `num_documents` and `num_tokens`, or a value below 1.
        DataError: an entry longer than `context` with `overlong` "error"; a table without usable entries.
    """
    if (num_documents is None) == (num_tokens is None):
        raise ConfigError("global batch: give its size either in documents or in tokens")
    size = num_tokens if num_documents is None else num_documents
    for name, value in (("steps", steps), ("batch size", size), ("context", context)):
        if value is None or value < 1:
            raise ConfigError(f"global batch: {name} is {value}, must be at least 1")
    if seed < 0:
        raise ConfigError(f"global batch: seed is {seed}, must be 0 or more")
    usable = lengths <= context
    if overlong == "error" and not usable.all():
        first = int(np.argmin(usable))
        raise DataError(
            f"document {first} has {lengths[first]} tokens, context is {context} "
            f"({int((~usable).sum())} of {len(lengths)} documents are longer); "
            "raise --context or choose --overlong split, truncate or drop"
        )
    if not len(lengths) or (overlong == "drop" and not usable.any()):
        raise DataError(f"no document of the table fits context {context}; raise --context or use --overlong split")
    entries = _entries(lengths, seed)
    next_id = 0
    batches = []
    for _ in range(steps):
        documents: list[Document] = []
        left_out: list[LeftOut] = []
        sampled = tokens = dropped = 0
        while (sampled < num_documents) if num_documents is not None else (tokens < num_tokens):  # type: ignore[operator]
            length = next(entries)
            sampled += 1
            if length > context and overlong == "drop":
                left_out.append(LeftOut(doc_id=next_id, num_tokens=length, reason=f"dropped: longer than {context}"))
                dropped += length
                next_id += 1
                continue
            pieces = _pieces(length, context, overlong)
            dropped += length - sum(pieces)
            for piece in pieces:
                documents.append(Document(doc_id=next_id, num_tokens=piece, num_label_tokens=piece - 1))
                tokens += piece
                next_id += 1
        batches.append(SampledBatch(tuple(documents), tuple(left_out), dropped))
    return tuple(batches)


def _entries(lengths: NDArray[np.int64], seed: int) -> Iterator[int]:
    """All entries of the table, reshuffled every round, without an end."""
    generator = np.random.default_rng(seed)
    while True:
        yield from generator.permutation(lengths).tolist()


def _pieces(length: int, context: int, overlong: Overlong) -> list[int]:
    if length <= context:
        return [length]
    if overlong == "truncate":
        return [context]
    whole, rest = divmod(length, context)
    return [context] * whole + ([rest] if rest else [])
