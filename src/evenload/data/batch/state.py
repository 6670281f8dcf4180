"""`LoaderState`: where a loader stands, without any text or tokens; small, global, independent of the layout.

Restoring reads again only the open block of each stream and the blocks of deferred documents, so it takes the same time
at step 10 and at step 10 million. It is exact to the bit if the sources and the data settings are the same, which the
fingerprint checks (`epochs` may be changed to train on, and how many processes read).
"""

from collections.abc import Sequence

import msgspec

from evenload.data.config import DataConfig
from evenload.data.ledger import LedgerState, Tally
from evenload.data.reading.block import BlockCursor
from evenload.errors import ConfigError
from evenload.types.base import Frozen
from evenload.types.document import Document

STATE_VERSION = 2

_HELD_OUT_FIELDS = ("held_out_share", "reads")
_FREE_FIELDS = (
    "sources", "mixture", "include", "tokenizer", "chat_template", "prepend_bos", "epochs", "workers", "prefetch_steps",
    "stall_timeout_s", *_HELD_OUT_FIELDS,
)  # fmt: skip
"""Settings that may differ, because the fingerprint holds what they lead to, or because they end a run."""


class DocumentPlace(Frozen, array_like=True):
    """Where a document can be read again: its block, and which one of it. `checksum` is of the block."""

    part: int
    stream: int
    epoch: int
    cursor: BlockCursor
    index: int
    checksum: int


class StreamState(Frozen, array_like=True):
    """A stream between two documents.

    Args:
        cursor: of the open block, or of the next one; None = the stream has ended for this epoch.
        taken: documents of that block that came already.
        left: what is left of the open block; it was counted as read.
        checksum: of the open block, where documents of it came already.
    """

    cursor: BlockCursor | None = BlockCursor()
    taken: int = 0
    left: Tally = Tally()
    checksum: int | None = None


class PartState(Frozen, array_like=True):
    """A part of the mixture between two documents.

    Args:
        epoch: pass over this part (the run's epoch, unless parts repeat).
        turn: stream that is asked next.
        documents: sampled in this pass.
        tokens: sampled since the weights began to count.
    """

    epoch: int
    turn: int
    documents: int
    tokens: int
    streams: tuple[StreamState, ...]


class DeferredDocument(Frozen):
    """A document that a plan deferred, and where its tokens are.

    Args:
        has_labels: it may have labels that differ from its tokens.
    """

    document: Document
    place: DocumentPlace
    has_labels: bool


class LoaderState(Frozen):
    """Everything that decides the coming batches.

    Args:
        step: number of the next global batch.
        next_doc_id: of the next new document.
        parts: where the streams of every part of the mixture stand.
        deferred: documents that plans deferred.
        fingerprint: data settings and sources by name, see `config_fingerprint`.
    """

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
    """What must be equal to resume exactly, by part; where files lie does not matter, their names and sizes do."""
    fields = {
        f"data.{field}": str(getattr(config, field)) for field in config.__struct_fields__ if field not in _FREE_FIELDS
    }
    if config.held_out_share:
        fields |= {f"data.{field}": str(getattr(config, field)) for field in _HELD_OUT_FIELDS}
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
    names = sorted(set(fingerprint) | set(state.fingerprint))
    differences = [
        f"{name}: saved with {state.fingerprint.get(name)}, now {fingerprint.get(name)}"
        for name in names
        if state.fingerprint.get(name) != fingerprint.get(name)
    ]
    if differences:
        raise ConfigError(
            "the loader state was made with other data settings, so the run cannot go on exactly: "
            + "; ".join(differences)
            + ". Restore these settings, or start the data anew without the state"
        )


def state_at_epoch(state: LoaderState, epoch: int) -> LoaderState:
    """The beginning of another epoch: all streams at their beginning, steps and account going on.

    Args:
        state: between two epochs; inside one, the account would miss what was read and not sampled.
    """
    parts = tuple(
        PartState(epoch=epoch, turn=0, documents=0, tokens=0, streams=(StreamState(),) * len(part.streams))
        for part in state.parts
    )
    return msgspec.structs.replace(state, epoch=epoch, parts=parts)


def encode_state(state: LoaderState) -> bytes:
    return msgspec.json.encode(state)


def decode_state(data: bytes) -> LoaderState:
    """Inverse of `encode_state`; a `ConfigError` where the bytes are no loader state."""
    try:
        return msgspec.json.decode(data, type=LoaderState)
    except msgspec.DecodeError as err:
        raise ConfigError(f"not a loader state: {err}; the checkpoint may be damaged or of another version") from err
