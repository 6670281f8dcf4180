"""`DataConfig`: which documents are read, how they become tokens, and what makes a global batch."""

from typing import Literal

from evenload.errors import ConfigError
from evenload.types.base import Frozen

Format = Literal["auto", "text", "jsonl", "parquet"]
Overlong = Literal["error", "split", "truncate", "drop"]
OnCorrupt = Literal["error", "skip"]


class DataConfig(Frozen):
    """Data settings of a run. Every field but `epochs` decides which tokens a step holds.

    Args:
        sources: files, directories (read recursively; names that begin with "." are left out), glob
            patterns, or fsspec URLs of any of these.
        format: "auto" goes by file name: `.jsonl`/`.ndjson`, `.parquet`, anything else is text (one
            document per file). A compression suffix that fsspec knows (`.gz`, `.xz`, `.bz2`, ...) may
            follow; resuming inside a compressed file has to read it from its beginning.
        text_column: key of a jsonl object or column of a parquet file that holds the text.
        include: file name patterns for directories, such as "*.py"; a pattern with "/" is matched
            against the path below the directory. Empty = every file.
        tokenizer: "bytes", a `tokenizer.json`, or a directory that holds one.
        eos_token: text of the end-of-document token; by default looked up beside or in the tokenizer file.
        append_eos: end every document with the end-of-document token.
        batch_documents, batch_tokens: size of a global batch; exactly one is set. A token budget takes
            documents in stream order until the next one would exceed it; a document that is larger than
            the budget is a batch of its own. The last batch of an epoch may be smaller.
        shuffle_window: documents held to draw from; 1 keeps the order of the files and inside them. With
            more than 1, the order of the files is permuted every epoch too.
        seed: of the order of files and documents.
        epochs: passes over the sources; None = repeat for ever.
        max_document_tokens: longest document that can be trained (the context).
        overlong: what happens to a longer one: an error naming it, consecutive documents of at most that
            length, only its first tokens, or nothing of it. All of it is in the ledger.
        on_corrupt: stop at a record that cannot be read, or count it in the ledger and go on.
    """

    sources: tuple[str, ...]
    format: Format = "auto"
    text_column: str = "text"
    include: tuple[str, ...] = ()
    tokenizer: str = "bytes"
    eos_token: str | None = None
    append_eos: bool = True
    batch_documents: int | None = None
    batch_tokens: int | None = None
    shuffle_window: int = 1024
    seed: int = 0
    epochs: int | None = None
    max_document_tokens: int
    overlong: Overlong = "error"
    on_corrupt: OnCorrupt = "error"

    def __post_init__(self) -> None:
        if not self.sources or not all(self.sources):
            raise ConfigError(f"data.sources is {list(self.sources)}; name at least one file, directory, glob or URL")
        if (self.batch_documents is None) == (self.batch_tokens is None):
            raise ConfigError(
                f"data.batch_documents is {self.batch_documents} and data.batch_tokens is {self.batch_tokens}; "
                "set exactly one of them"
            )
        for field in ("batch_documents", "batch_tokens", "shuffle_window", "epochs", "max_document_tokens"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise ConfigError(f"data.{field} is {value}, must be at least 1")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"data.seed is {self.seed}, must be in 0 .. 2**63 - 1")
        choices = {
            "format": ("auto", "text", "jsonl", "parquet"),
            "overlong": ("error", "split", "truncate", "drop"),
            "on_corrupt": ("error", "skip"),
        }
        for field, allowed in choices.items():
            if getattr(self, field) not in allowed:
                raise ConfigError(f"data.{field} is '{getattr(self, field)}'; choose one of {', '.join(allowed)}")
        if not self.text_column:
            raise ConfigError("data.text_column is empty; name the key or column that holds the text")
