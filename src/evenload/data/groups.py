"""Form groups of sequences that may share prefixes (`GroupReader`, `PairReader`), and make documents of them.

A group is a record that holds several sequences, or records that follow each other in a file and have the same value of
`data.group_by`. Its trees (`data.prefix_tree`) are documents of unique tokens; what shares nothing stays plain. Price:
a group is in memory as a whole, and what a resume begins in is read again; 23 ns a token to find what is shared.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from evenload.data.config import DataConfig
from evenload.data.encoders import IGNORE_INDEX, DocumentEncoder, EncodedDocument
from evenload.data.prefix_tree import PrefixTree, build_trees, labels_once, sequences_in_order, split_into_runs
from evenload.data.records import FilePart, FileSummary, Member, Record, RecordReader
from evenload.errors import DataError

MOST_SEQUENCES = 1 << 14
"""A larger group is an error: the field names no group, and all of it would be in memory."""


@dataclass(frozen=True, eq=False)
class GroupReader(RecordReader):
    """Join records of another reader that follow each other and have the same value of a column; the same value further
    on is another group, and a record that cannot be read ends one.

    Args:
        at: place of the column among the values of a record; `is_read` = an encoder reads it, too.
    """

    inner: RecordReader
    name: str
    at: int
    is_read: bool

    def can_share(self) -> bool:
        return False  # a group may lie across the border of two parts

    def summary(self) -> FileSummary:
        return self.inner.summary()

    def origin(self, offset: int) -> str:
        return self.inner.origin(offset)

    def read(self, part: FilePart, offset: int | None) -> Iterator[Record]:
        group: list[Record] = []
        key: bytes | None = None
        num_sequences = 0
        for record in self.inner.read(part, offset):
            own, members = self._keyed(record)
            if group and (own is None or own != key):
                yield _joined(group)
                group, num_sequences = [], 0
            if own is None:
                problem = record.problem or f"column '{self.name}': null is not a value of data.group_by"
                yield Record(record.offset, record.next_offset, None, problem)
                continue
            key = own
            group.append(record._replace(values=None, sequences=members))
            num_sequences += len(members)
            if num_sequences > MOST_SEQUENCES:
                raise DataError(
                    f"{self.origin(group[0].offset)} begins a group of more than {MOST_SEQUENCES:,} sequences with the "
                    f"same '{self.name}'; name a field by data.group_by that says which ones share a prompt"
                )
        if group:
            yield _joined(group)

    def _keyed(self, record: Record) -> tuple[bytes | None, tuple[Member, ...]]:
        """Return the value of the column, None where a record has none or several, and the sequences without it."""
        members = record.sequences
        if record.values is not None:
            members = (Member(record.offset, record.values),)
        keys = {_encoded(one.values[self.at]) for one in members}
        if not self.is_read:
            members = tuple(Member(at, values[: self.at] + values[self.at + 1 :]) for at, values in members)
        return (keys.pop() if len(keys) == 1 else None), members


def _encoded(value: Any) -> bytes | None:
    if value is None:
        return None
    return msgspec.msgpack.encode(value, enc_hook=lambda one: one.tolist() if hasattr(one, "tolist") else repr(one))


def _joined(group: Sequence[Record]) -> Record:
    first, last = group[0], group[-1]
    members = tuple(one for record in group for one in record.sequences)
    if len(members) == 1:
        return Record(first.offset, last.next_offset, members[0].values)
    return Record(first.offset, last.next_offset, None, sequences=members)


@dataclass(frozen=True, eq=False)
class PairReader(RecordReader):
    """Read a preference pair (chosen, rejected, prompt, further values) as two sequences: prompt, answer, others."""

    inner: RecordReader

    def can_share(self) -> bool:
        return self.inner.can_share()

    def num_parts(self, part_bytes: int) -> int:
        return self.inner.num_parts(part_bytes)

    def summary(self) -> FileSummary:
        return self.inner.summary()

    def origin(self, offset: int) -> str:
        return self.inner.origin(offset)

    def read(self, part: FilePart, offset: int | None) -> Iterator[Record]:
        for record in self.inner.read(part, offset):
            members = record.sequences
            if record.values is not None:
                members = (Member(record.offset, record.values),)
            pairs = tuple(
                Member(at, (*(values[2:3] or (None,)), answer, *values[3:]))
                for at, values in members
                for answer in values[:2]
            )
            yield record._replace(values=None, sequences=pairs)


Dropped = tuple[str, int, int]
SequenceOutcome = EncodedDocument | str | Dropped | None
Outcome = SequenceOutcome | list[SequenceOutcome]
"""Of a record: its document, problem, what is dropped (reason, documents, tokens), or None = not read; a list of its
sequences, which may share prefixes."""


def encode_groups(encoder: DocumentEncoder, records: Sequence[Record]) -> list[Outcome]:
    """Return the document of every record, or what is wrong with it; of several sequences, all of theirs."""
    if not any(record.sequences for record in records):
        return list(encoder.encode_records(records))
    flat = [
        one
        for record in records
        for one in ([Record(at, at, values) for at, values in record.sequences] if record.sequences else [record])
    ]
    encoded = iter(encoder.encode_records(flat))
    return [[next(encoded) for _ in one.sequences] if one.sequences else next(encoded) for one in records]


def make_documents(sequences: Sequence[EncodedDocument], config: DataConfig, most_tokens: int) -> list[EncodedDocument]:
    """Make documents of the sequences of a group, none of which is empty or has more than `most_tokens`.

    A tree with more unique tokens is cut into runs of its leaves in lexicographic order. Raises `DataError` for labels
    that are other ids than their tokens, which sequences that share these cannot all have.
    """
    if len(sequences) < 2:
        return list(sequences)
    tokens = [one.tokens for one in sequences]
    weights = [_weights(one) for one in sequences]
    if config.tree_labels == "once":  # before trees are cut, so that no two of their parts train the same token
        weights = labels_once(tokens, weights)
    found: list[EncodedDocument] = []
    for tree in build_trees(tokens, weights, min_shared_tokens=config.min_shared_tokens):
        if len(tree.tokens) <= most_tokens:
            found.append(_document(tree))
            continue
        members = [place for place, _ in tree.leaves]
        own = [tokens[place] for place in members]
        found += _cut(own, [weights[place] for place in members], config.min_shared_tokens, most_tokens)
    return found


def _weights(sequence: EncodedDocument) -> np.ndarray:
    tokens, labels = sequence.tokens, sequence.labels
    if labels is None:
        return np.ones(len(tokens))
    has_label = labels != IGNORE_INDEX
    if (wrong := np.flatnonzero(has_label & (labels != tokens))).size:
        at = int(wrong[0])
        raise DataError(
            f"token {at} of a sequence that may share its prefix is {tokens[at]} and has the label {labels[at]}; "
            f"labels of such sequences are the tokens themselves, or {IGNORE_INDEX}: write each as a record of its own"
        )
    return has_label.astype(np.float64)


def _cut(
    sequences: Sequence[np.ndarray], weights: Sequence[np.ndarray], min_shared: int, most_tokens: int
) -> list[EncodedDocument]:
    """Return the documents of a tree that is too large, with the tokens that each has in common with those before."""
    order, shared = sequences_in_order(sequences)
    shared_before = dict(zip(order, shared.tolist(), strict=True))
    # Runs are counted as if all that is common were shared; where short prefixes are not, they hold fewer sequences.
    budget = most_tokens
    while True:
        runs = split_into_runs(sequences, budget)
        trees = [
            build_trees([sequences[at] for at in run], [weights[at] for at in run], min_shared_tokens=min_shared)
            for run in runs
        ]
        largest = max(len(tree.tokens) for several in trees for tree in several)
        if largest <= most_tokens:
            break
        budget -= largest - most_tokens
    found: list[EncodedDocument] = []
    for run, several in zip(runs, trees, strict=True):
        for tree in several:
            is_first = any(place == 0 for place, _ in tree.leaves)
            found.append(_document(tree, shared_before[run[0]] if is_first else 0))
    return found


def _document(tree: PrefixTree, num_recomputed: int = 0) -> EncodedDocument:
    counts = tree.weights.astype(np.int32)
    labels = np.where(counts > 0, tree.tokens, np.int32(IGNORE_INDEX))
    is_tree = len(tree.leaves) > 1
    return EncodedDocument(
        tree.tokens,
        None if (counts[1:] > 0).all() else labels,
        None if (counts <= 1).all() else counts,
        tree.segments if is_tree else (),
        tree.num_path_tokens if is_tree else 0,
        num_recomputed,
    )
