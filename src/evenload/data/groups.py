"""Form groups of sequences that may share prefixes (`GroupReader`, `PairReader`), and make documents of them.

A group is a record that holds several sequences, or records that follow each other in a file and have the same value of
`data.group_by`. Its trees (`data.prefix_tree`) are documents of unique tokens; what shares nothing stays plain. Price:
a group is in memory as a whole, and is read again where a resume begins inside it; 25 ns a token and 30 µs a sequence
to find what is shared.
"""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from evenload.data.config import DataConfig
from evenload.data.encoders import IGNORE_INDEX, DocumentEncoder, EncodedDocument
from evenload.data.prefix_tree import PrefixTree, build_trees, labels_once
from evenload.data.records import FilePart, FileSummary, Member, Record, RecordReader
from evenload.errors import DataError
from evenload.types.tree import TreePart, TreeShape

MOST_RECORDS = 1 << 14
"""A larger group is an error: the field names no group, and all of it would be in memory."""


@dataclass(frozen=True, eq=False)
class _FormingReader(RecordReader):
    """Form groups of the records of another reader."""

    inner: RecordReader

    def summary(self) -> FileSummary:
        return self.inner.summary()

    def origin(self, offset: int) -> str:
        return self.inner.origin(offset)


@dataclass(frozen=True, eq=False)
class GroupReader(_FormingReader):
    """Join records that follow each other and have the same value of a column; the same value further on is another
    group, and a record that cannot be read ends one.

    Args:
        at: place of the column among the values of a record; `is_read` = an encoder reads it, too.
    """

    name: str
    at: int
    is_read: bool

    def can_share(self) -> bool:
        return False  # a group may lie across the border of two parts

    def read(self, part: FilePart, offset: int | None) -> Iterator[Record]:
        keyed = map(self._keyed, self.inner.read(part, offset))
        for key, run in itertools.groupby(keyed, lambda one: one[0]):
            if key is None:
                yield from (record for _, record in run)
                continue
            group = [record for _, record in itertools.islice(run, MOST_RECORDS + 1)]
            if len(group) > MOST_RECORDS:
                raise DataError(
                    f"{self.origin(group[0].offset)} begins a group of more than {MOST_RECORDS:,} records with the "
                    f"same '{self.name}'; name a field by data.group_by that says which ones share a prompt"
                )
            members = tuple(one for record in group for one in record.sequences)
            joined = Record(group[0].offset, group[-1].next_offset, None, sequences=members)
            yield joined if len(members) > 1 else joined._replace(values=members[0].values, sequences=())

    def _keyed(self, record: Record) -> tuple[bytes | None, Record]:
        """Return the value of the column, as bytes, and the record without it; None and the record's problem."""
        members = _members(record)
        value = members[0].values[self.at] if members else None
        if value is None:
            problem = record.problem or f"column '{self.name}': null is not a value of data.group_by"
            return None, record._replace(values=None, problem=problem, sequences=())
        if not self.is_read:
            members = tuple(Member(at, values[: self.at] + values[self.at + 1 :]) for at, values in members)
        key = msgspec.msgpack.encode(value, enc_hook=lambda one: one.tolist() if hasattr(one, "tolist") else repr(one))
        return key, record._replace(values=None, sequences=members)


@dataclass(frozen=True, eq=False)
class PairReader(_FormingReader):
    """Read a preference pair (chosen, rejected, prompt, further values) as two sequences: prompt, answer, others."""

    def can_share(self) -> bool:
        return self.inner.can_share()

    def num_parts(self, part_bytes: int) -> int:
        return self.inner.num_parts(part_bytes)

    def read(self, part: FilePart, offset: int | None) -> Iterator[Record]:
        for record in self.inner.read(part, offset):
            answers = [(at, values, one) for at, values in _members(record) for one in values[:2]]
            pairs = (Member(at, (*(values[2:3] or (None,)), one, *values[3:])) for at, values, one in answers)
            yield record._replace(values=None, sequences=tuple(pairs))


def _members(record: Record) -> tuple[Member, ...]:
    return record.sequences if record.values is None else (Member(record.offset, record.values),)


Dropped = tuple[str, int, int]
SequenceOutcome = EncodedDocument | str | Dropped | None
Outcome = SequenceOutcome | list[SequenceOutcome]
"""Of a record: its document, problem, what is dropped (reason, documents, tokens), or None = not read; a list of its
sequences, which may share prefixes."""


def encode_groups(encoder: DocumentEncoder, records: Sequence[Record]) -> list[Outcome]:
    """Return the document of every record, or what is wrong with it; of several sequences, all of theirs."""
    if not any(record.sequences for record in records):
        return list(encoder.encode_records(records))
    flat: list[Record] = []
    for record in records:
        flat += [Record(at, at, values) for at, values in record.sequences] or [record]
    encoded = iter(encoder.encode_records(flat))
    return [[next(encoded) for _ in one.sequences] if one.sequences else next(encoded) for one in records]


def make_documents(sequences: Sequence[EncodedDocument], config: DataConfig) -> list[EncodedDocument]:
    """Make documents of the sequences of a group, none of which is empty or longer than the longest document.

    A tree with more unique tokens than `most_tree_tokens` is cut into the fewest parts, each as long as it goes. Raises
    `DataError` for labels that are other ids than their tokens, which sequences that share these cannot all have.
    """
    if len(sequences) < 2:
        return list(sequences)
    tokens, weights = [one.tokens for one in sequences], [_weights(one) for one in sequences]
    if config.tree_labels == "once":
        weights = labels_once(tokens, weights)
    documents: list[EncodedDocument] = []
    for one in map(_document, build_trees(tokens, weights, min_shared_tokens=config.min_shared_tokens)):
        if len(one.tokens) <= config.most_tree_tokens:
            documents.append(one)
        else:
            shape = TreeShape(one.segments)
            documents += cut_tree(one, shape.parts(shape.cuts_within(config.most_tree_tokens)))
    return documents


def cut_tree(document: EncodedDocument, parts: Sequence[TreePart]) -> list[EncodedDocument]:
    """Return the parts of a tree as documents. Each label is in the first part that has its token."""
    tokens, counts = document.tokens, document.label_counts
    labels = np.append(np.int32(IGNORE_INDEX), tokens[1:]) if document.labels is None else document.labels
    of_others = Counter(length for part in parts[1:] for length in part.path_lengths)
    cut, of_first = [], tuple((Counter(document.sequence_lengths) - of_others).elements())
    for part in parts:
        own = labels[part.rows]
        own[: part.num_recomputed] = IGNORE_INDEX
        of_rows = tokens[part.rows], own, None if counts is None else counts[part.rows]
        lengths = part.path_lengths if part.num_recomputed else of_first
        cut.append(EncodedDocument(*of_rows, part.segments, lengths, part.num_recomputed))
    return cut


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


def _document(tree: PrefixTree) -> EncodedDocument:
    counts = tree.weights.astype(np.int32)
    labels = np.where(counts > 0, tree.tokens, np.int32(IGNORE_INDEX))
    is_tree = len(tree.leaves) > 1
    return EncodedDocument(
        tree.tokens,
        None if (counts[1:] > 0).all() else labels,
        None if (counts <= 1).all() else counts,
        tree.segments if is_tree else (),
        tree.sequence_lengths if is_tree else (),
    )
