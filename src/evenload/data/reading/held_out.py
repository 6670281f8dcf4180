"""`HoldOut`: which documents of the data are held out for validation, and which of both a reader takes.

A record is held out where a hash of its file's key (source and path below it) and its offset falls below the share. So
the choice is of the data alone: order, seed, epochs, ranks, workers and resumes play no part, a data set that moves
keeps it, and a larger share holds out all that a smaller one does. Documents that one record is split into stay
together. Texts that stand twice in the data are two records: one may be trained while the other validates.

Who trains encodes what is held out, too, and counts it in the ledger. Who validates passes over the rest unencoded, and
does not open files of one document that is none of its own. Price: a hash a record, about 1 µs; of a share of large
files a whole reading.
"""

from dataclasses import dataclass
from hashlib import blake2b

from evenload.data.config import DataConfig

HELD_OUT = "held out for validation"
"""Reason in the ledger."""
_HASH_BYTES = 8


@dataclass(frozen=True)
class HoldOut:
    """Of one reader.

    Args:
        share: of all records that is held out.
        takes: what is held out, else the rest.
    """

    share: float
    takes: bool

    @staticmethod
    def of(config: DataConfig) -> "HoldOut | None":
        """None where all documents are read alike."""
        return HoldOut(config.held_out_share, config.reads == "held_out") if config.held_out_share else None

    def is_held_out(self, key: str, offset: int) -> bool:
        """A record of the file with this key."""
        hashed = blake2b(f"{key}\n{offset}".encode(errors="surrogateescape"), digest_size=_HASH_BYTES).digest()
        return int.from_bytes(hashed) < self.share * 256**_HASH_BYTES
