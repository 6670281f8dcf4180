"""Data that the loader's benchmarks read: made on the fly in a temporary directory, never downloaded."""

import json
import struct
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray

from evenload.data.tokenize import train_byte_pair_tokenizer

VOCAB_SIZE = 8_192
SHORT_TOKENS = (50, 201)
"""Half-open range of the lengths of short documents, drawn evenly."""


def short_lengths(count: int, low: int = SHORT_TOKENS[0], high: int = SHORT_TOKENS[1]) -> NDArray[np.int64]:
    """Lengths in `[low, high)`, seed 0."""
    return np.random.default_rng(0).integers(low, high, count)


def write_tokens(path: Path, lengths: NDArray[np.int64], vocab_size: int = VOCAB_SIZE) -> None:
    """Random ids of documents of these lengths as Megatron's `.bin` (int32) and `.idx`; `path` without a suffix."""
    generator = np.random.default_rng(0)
    generator.integers(0, vocab_size, int(lengths.sum()), dtype=np.int32).tofile(path.with_suffix(".bin"))
    pointers = np.concatenate([[0], np.cumsum(lengths)[:-1]]) * 4
    with path.with_suffix(".idx").open("wb") as file:
        file.write(struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 4, len(lengths), len(lengths) + 1))
        for column, dtype in ((lengths, "<i4"), (pointers, "<i8"), (np.arange(len(lengths) + 1), "<i8")):
            file.write(column.astype(dtype).tobytes())


def library_texts(limit_bytes: int | None = None) -> list[str]:
    """The files of the Python standard library of this interpreter, sorted by path, test files left out."""
    texts, total = [], 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if {"test", "site-packages", "idlelib"} & set(path.parts):
            continue
        text = path.read_bytes().decode("utf-8", errors="replace")
        texts.append(text)
        total += len(text)
        if limit_bytes is not None and total >= limit_bytes:
            break
    return texts


def text_pieces(texts: list[str], low: int = 100, high: int = 20_000) -> list[str]:
    """The texts cut into pieces of log-uniform length in characters, seed 0: documents of many lengths."""
    joined = "\n".join(texts)
    generator = np.random.default_rng(0)
    pieces, at = [], 0
    while at < len(joined):
        size = int(np.exp(generator.uniform(np.log(low), np.log(high))))
        pieces.append(joined[at : at + size])
        at += size
    return pieces


def write_jsonl(path: Path, pieces: list[str], size_bytes: int) -> int:
    """The pieces over and over until the file has that size; how many lines it has."""
    lines = [json.dumps({"text": piece}).encode() + b"\n" for piece in pieces]
    block, count, written = b"".join(lines), 0, 0
    with path.open("wb") as file:
        while written + len(block) <= size_bytes:
            written += file.write(block)
            count += len(lines)
        for line in lines:
            if written >= size_bytes:
                break
            written += file.write(line)
            count += 1
    return count


def write_tokenizer(directory: Path) -> Path:
    """A byte-pair tokeniser trained on a part of the standard library."""
    path = directory / "tokenizer.json"
    train_byte_pair_tokenizer(library_texts(1_000_000), VOCAB_SIZE, path)
    return path


@contextmanager
def work_directory() -> Iterator[Path]:
    """A temporary directory, removed at the end whatever happens."""
    with TemporaryDirectory(prefix="evenload-loader-") as name:
        yield Path(name)
