"""A tokeniser for the loader from what a caller has: a path, one of ours, or a fast one of transformers.

One of transformers is written to a directory for a moment and read back as `tokenizer.json`: content, end of document
and chat template are those that transformers would load.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from evenload.data.config import DataConfig, trains_given_ids
from evenload.data.tokenize import BYTES, MAX_BYTE_VOCABULARY, DocumentTokenizer, describe_tokenizer
from evenload.errors import ConfigError


@contextmanager
def tokenizer_settings(config: DataConfig, tokenizer: Any) -> Iterator[tuple[DataConfig, DocumentTokenizer | None]]:
    """Data settings that name the tokeniser, and the tokeniser where settings cannot name it.

    Args:
        tokenizer: None = the one that the settings name; a path or "bytes"; a `DocumentTokenizer`; a fast tokeniser of
            transformers, whose files exist inside the `with` block only.

    Raises:
        ConfigError: a slow tokeniser, or something else.
    """
    if tokenizer is None:
        yield config, None
    elif isinstance(tokenizer, str | Path):
        yield msgspec.structs.replace(config, tokenizer=str(tokenizer)), None
    elif all(hasattr(tokenizer, name) for name in ("encode_with_offsets", "encode_batch", "eos_id")):
        yield config, tokenizer
    elif hasattr(tokenizer, "save_pretrained"):
        if getattr(tokenizer, "backend_tokenizer", None) is None:
            raise ConfigError(
                f"tokenizer {type(tokenizer).__name__} is a slow one, without a tokenizer.json; load it with "
                "use_fast=True, or convert it once and give the path"
            )
        with tempfile.TemporaryDirectory() as directory:
            tokenizer.save_pretrained(directory)
            yield msgspec.structs.replace(config, tokenizer=directory), None
    else:
        raise ConfigError(
            f'tokenizer is a {type(tokenizer).__name__}; give "bytes", a tokenizer.json or its directory, a fast '
            "tokeniser of transformers, or a DocumentTokenizer"
        )


def require_choice(config: DataConfig, tokenizer: Any, vocab_size: int | None) -> None:
    """Refuse plain bytes that nobody asked for where the caller's model has another vocabulary: a `ConfigError`."""
    if tokenizer is not None or config.tokenizer is not None or vocab_size is None or trains_given_ids(config):
        return
    if vocab_size > MAX_BYTE_VOCABULARY:
        raise ConfigError(
            f"tokenizer is not given, and the model's vocabulary of {vocab_size:,} ids is not one of bytes; give the "
            f'model\'s tokeniser or its directory, or say tokenizer="{BYTES}" to train a model from scratch on bytes'
        )


def loader_tokenizer_fact(config: DataConfig, given: Any, opened: DocumentTokenizer, vocab_size: int | None) -> str:
    """What the first lines say about the tokeniser that is used (`opened`), and whether the caller chose it."""
    if trains_given_ids(config):
        known = (
            "not checked, as the model is not known" if vocab_size is None else f"checked to be below {vocab_size:,}"
        )
        return f"none: records hold token ids, {known}"
    chosen = ", because none was given" if given is None and config.tokenizer is None else ""
    origin = ""
    if hasattr(given, "save_pretrained"):
        origin = str(getattr(given, "name_or_path", "") or type(given).__name__)
    return describe_tokenizer(opened, origin) + chosen
