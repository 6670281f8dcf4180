"""Data that the loader's benchmarks read: made on the fly in a temporary directory, never downloaded."""

import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

VOCAB_SIZE = 8_192
SHORT_TOKENS = (50, 201)  # half-open range of the lengths of short documents, drawn evenly


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
