"""Define the documents of one optimizer step (`GlobalBatch`), a loader's state (`LoaderState`), and ranks that read
together (`Peers`).

A state is small, independent of the layout, and holds no text or tokens. Restoring reads again only open blocks and
those of deferred documents; it is exact if sources and settings are the same, which the fingerprint checks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from evenload.data.blocks import BlockCursor, BlockHeader, BlockRequest, TokenTable, join_tables, make_table
from evenload.data.config import DataConfig
from evenload.data.encoders import EncodedDocument
from evenload.data.groups import cut_tree
from evenload.data.ledger import LedgerState, Tally
from evenload.errors import ConfigError
from evenload.types.base import Frozen
from evenload.types.document import PART_IDS, Document, parts_of
from evenload.types.tree import shape_of


class Peers(Protocol):
    """The ranks that read one data set together: `size` of them, this one is `rank`."""

    rank: int
    size: int

    def gather(self, data: bytes) -> list[bytes]:
        """Return every rank's bytes, by rank, on every rank."""

    def broadcast(self, data: bytes) -> bytes:
        """Return rank 0's bytes on every rank; what the others pass is ignored."""

    def exchange(self, outgoing: Sequence[NDArray[np.int32]], incoming: Sequence[int]) -> list[NDArray[np.int32]]:
        """Send `outgoing[r]` to rank r and receive int32[incoming[r]] from it; by rank."""


class SingleRank:
    """A single rank."""

    rank, size = 0, 1

    def gather(self, data: bytes) -> list[bytes]:
        return [data]

    def broadcast(self, data: bytes) -> bytes:
        return data

    def exchange(self, outgoing: Sequence[NDArray[np.int32]], incoming: Sequence[int]) -> list[NDArray[np.int32]]:
        return list(outgoing)


STATE_VERSION = 3

_HELD_OUT_FIELDS = ("held_out_share", "reads")
_FREE_FIELDS = (
    "sources", "mixture", "include", "tokenizer", "chat_template", "prepend_bos", "epochs", "workers", "prefetch_steps",
    "stall_timeout_s", *_HELD_OUT_FIELDS,
)  # fmt: skip
"""Settings that may differ: the fingerprint holds what they lead to, or they do not decide the documents."""


class DocumentPlace(Frozen, array_like=True):
    """Where a document can be read again: row `index` of a block with this `checksum`."""

    block: BlockRequest
    index: int
    checksum: int

    @property
    def part(self) -> int:
        return self.block.key.part


class StreamState(Frozen, array_like=True):
    """A stream between two documents: cursor of the open or next block (None = the stream has ended), documents of the
    open block that were taken, the rest, which counts as read, and the block's checksum."""

    cursor: BlockCursor | None = BlockCursor()
    taken: int = 0
    left: Tally = Tally()
    checksum: int | None = None


class PartState(Frozen, array_like=True):
    """A part of the mixture between two documents: the pass over it (the run's epoch, unless parts repeat), the stream
    that gives the next document, documents sampled in this pass, and tokens since the weights began to count."""

    epoch: int = 0
    turn: int = 0
    documents: int = 0
    tokens: int = 0
    streams: tuple[StreamState, ...] = ()


class DeferredDocument(Frozen):
    """A document that a plan deferred; `has_labels` = its labels may differ from its tokens."""

    document: Document
    place: DocumentPlace
    has_labels: bool


class LoaderState(Frozen):
    """All that decides the coming batches: number of the next one, id of the next new document, place in the streams of
    every part of the mixture, data settings and sources by name (`config_fingerprint`)."""

    version: int = STATE_VERSION
    step: int
    epoch: int
    next_doc_id: int
    parts: tuple[PartState, ...]
    deferred: tuple[DeferredDocument, ...]
    ledger: LedgerState
    fingerprint: dict[str, str]


def config_fingerprint(
    config: DataConfig, files_digests: Sequence[str], encoder_names: Sequence[str]
) -> dict[str, str]:
    """Return what must be equal to resume exactly, by name. Of files names and sizes count, not where they lie."""
    decisive = [field for field in config.__struct_fields__ if field not in _FREE_FIELDS]
    decisive += _HELD_OUT_FIELDS if config.held_out_share else ()
    fields = {f"data.{field}": str(getattr(config, field)) for field in decisive}
    fields["data.streams"] = str(config.num_streams)
    for index, (digest, encoder) in enumerate(zip(files_digests, encoder_names, strict=True)):
        name = config.mixture[index].name if config.mixture else "sources"
        fields |= {f"files of {name}": digest, f"encoding of {name}": encoder}
        if config.mixture:
            fields[f"weight of {name}"] = str(config.mixture[index].weight)
    return fields


def check_fingerprint(state: LoaderState, fingerprint: dict[str, str]) -> None:
    """Refuse a state that was made with other data: a `ConfigError` that names every difference."""
    if state.version != STATE_VERSION:
        raise ConfigError(f"loader state has version {state.version}, this Evenload reads version {STATE_VERSION}")
    differences = [
        f"{name}: saved with {state.fingerprint.get(name)}, now {fingerprint.get(name)}"
        for name in sorted(fingerprint.keys() | state.fingerprint.keys())
        if state.fingerprint.get(name) != fingerprint.get(name)
    ]
    if differences:
        raise ConfigError(f"the loader state has other data settings: {'; '.join(differences)}; restore or leave it")


def state_at_epoch(state: LoaderState, epoch: int) -> LoaderState:
    """Return a state between two epochs at the beginning of another epoch; steps and account continue."""
    parts = tuple(PartState(epoch=epoch, streams=(StreamState(),) * len(part.streams)) for part in state.parts)
    return msgspec.structs.replace(state, epoch=epoch, parts=parts)


def encode_state(state: LoaderState) -> bytes:
    return msgspec.json.encode(state)


def decode_state(data: bytes) -> LoaderState:
    """Decode bytes of `encode_state`; `ConfigError` where they are none."""
    try:
        return msgspec.json.decode(data, type=LoaderState)
    except msgspec.DecodeError as err:
        raise ConfigError(f"not a loader state: {err}; the checkpoint may be damaged or of another version") from err


@dataclass(frozen=True, eq=False, slots=True)
class OpenBlock:
    """A block that documents are sampled from; on ranks that do not read its stream `table`, the tokens, is None.
    lengths and num_labels are int32[num_documents]."""

    request: BlockRequest
    header: BlockHeader
    lengths: NDArray[np.int32]
    num_labels: NDArray[np.int32]
    table: TokenTable | None

    def sampled(self, row: int, doc_id: int) -> "SampledDocument":
        """Return a document of the block under an id."""
        num_tokens, num_labels = self.lengths.item(row), self.num_labels.item(row)
        document = Document(doc_id=doc_id, num_tokens=num_tokens, num_label_tokens=num_labels)
        if tree := self.header.trees.get(row):
            known = {field: value for field, value in tree._asdict().items() if field != "num_labels"}
            document = msgspec.structs.replace(document, **known)
        return SampledDocument(document=document, block=self, row=row)

    def tally(self) -> Tally:
        """Sum up all documents."""
        trees = self.header.trees
        return Tally(
            documents=len(self.lengths),
            tokens=int(self.lengths.sum()),
            shared_tokens=sum(max(0, one.num_path_tokens - self.lengths.item(row)) for row, one in trees.items()),
            recomputed_tokens=sum(one.num_recomputed_tokens for one in trees.values()),
        )


class SampledDocument(Frozen, gc=False):
    """A new document, and the row of the block that holds it."""

    document: Document
    block: OpenBlock
    row: int


@dataclass(frozen=True, eq=False)
class Deferral:
    """A document that a plan deferred; its content on the rank that reads its stream."""

    saved: DeferredDocument
    content: EncodedDocument | None


@dataclass(frozen=True, eq=False, kw_only=True)
class GlobalBatch:
    """The documents of one optimizer step: `documents` are new, in stream order; `tokens` of those that were read here.

    Args:
        has_labels: some document's labels differ from its tokens.
        deferrals: documents that earlier plans deferred, by id.
        is_last: the data has ended and only carried documents are left: the plan must not defer again.
    """

    step: int
    epoch: int
    documents: tuple[Document, ...]
    tokens: TokenTable
    sampled: tuple[SampledDocument, ...]
    has_labels: bool = False
    deferrals: Mapping[int, Deferral] = field(default_factory=dict)
    is_last: bool = False

    @cached_property
    def has_label_counts(self) -> bool:
        """Some label may be trained more than once: a document is a tree."""
        return any(document.segments for document in self.documents + self.carried)

    @property
    def carried(self) -> tuple[Document, ...]:
        """Return the documents that earlier plans deferred, oldest first; to be planned with the new ones."""
        return tuple(entry.saved.document for entry in self.deferrals.values())

    def cut_trees(self, cuts: Mapping[int, Sequence[int]]) -> "GlobalBatch":
        """Return the batch with new documents that are trees in parts: `cuts` by doc_id, as `TreeShape.parts` takes
        them."""
        if not cuts:
            return self
        documents = list[Document]()
        content = {doc_id: self.tokens.at(row) for row, doc_id in enumerate(self.tokens.doc_ids.tolist())}
        for one, sampled in zip(self.documents, self.sampled, strict=True):
            if one.doc_id not in cuts:
                documents.append(one)
                continue
            parts = shape_of(one.segments).parts(cuts[one.doc_id])
            made = parts_of(one, parts, sampled.block.header.trees[sampled.row].num_labels)
            documents += made
            if (tree := content.pop(one.doc_id, None)) is not None:
                content |= zip([part.doc_id for part in made], cut_tree(tree, parts), strict=True)
        tokens = make_table(list(content), list(content.values()))
        return replace(self, documents=tuple(documents), tokens=tokens, has_labels=True)

    def place(self, doc_id: int) -> DocumentPlace:
        if doc_id in self.deferrals:
            return self.deferrals[doc_id].saved.place
        one = self.sampled[doc_id % PART_IDS - self.documents[0].doc_id]
        return DocumentPlace(block=one.block.request, index=one.row, checksum=one.block.header.checksum)


def own_tokens(sampled: Sequence[SampledDocument], carried: Mapping[int, Deferral]) -> TokenTable:
    """Return the tokens of the documents that this rank has read. A batch takes consecutive rows of a block."""
    by_block: dict[OpenBlock, list[SampledDocument]] = {}
    for one in sampled:
        by_block.setdefault(one.block, []).append(one)
    tables: list[TokenTable] = []
    for block, members in by_block.items():
        if block.table is not None:
            doc_ids = np.array([one.document.doc_id for one in members], np.int64)
            tables.append(block.table.span(members[0].row, members[-1].row + 1, doc_ids))
    waiting = {doc_id: entry.content for doc_id, entry in carried.items() if entry.content is not None}
    if waiting:
        tables.append(make_table(list(waiting), list(waiting.values())))
    return join_tables(tables)
