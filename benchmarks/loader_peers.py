"""Public packers that take tokens and stream, each behind one call: all documents of a memmap to packs ready to train.

Nothing of theirs is copied; what is not installed is left out with the reason (see benchmarks/peers.txt). A pack is
ready when a model could take it: ids, targets or segment ids, positions. Whatever comes before the first document (a
table in memory for TRL, compilation for axolotl) is not timed.
"""

# pyright: reportMissingImports=false
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

PackAll = Callable[[], tuple[int, int, int]]
"""Packs everything; (packs, tokens, documents)."""

GRAIN_BINS = 64


@dataclass(frozen=True, eq=False)
class TokenFile:
    """Documents of a memmap.

    Args:
        path: of the `.bin` (int32), without suffix.
        lengths: int64[n].
    """

    path: Path
    lengths: NDArray[np.int64]

    def edges(self) -> NDArray[np.int64]:
        """int64[n + 1], in tokens."""
        return np.concatenate([[0], np.cumsum(self.lengths)])

    def tokens(self) -> NDArray[np.int32]:
        """The mapped file."""
        return np.memmap(self.path.with_suffix(".bin"), dtype=np.int32, mode="r")


class TokenRows:
    """The documents by index, as grain's random-access sources and samplers want them."""

    def __init__(self, file: TokenFile) -> None:
        self._tokens, self._edges = file.tokens(), file.edges().tolist()

    def __len__(self) -> int:
        return len(self._edges) - 1

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self._tokens[self._edges[index] : self._edges[index + 1]]}


class StreamPacker(NamedTuple):
    """A packer of somebody else; `load` raises ImportError where it is not installed."""

    name: str
    load: Callable[[TokenFile, int], PackAll]


def _grain(file: TokenFile, window: int) -> PackAll:
    import grain
    from grain.experimental import FirstFitPackIterDataset

    def pack() -> tuple[int, int, int]:
        source = grain.MapDataset.source(TokenRows(file)).shuffle(seed=0)
        packed = FirstFitPackIterDataset(
            # Its threads only slow a memmap down.
            source.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)),
            length_struct={"input_ids": window},
            num_packing_bins=GRAIN_BINS,
            shuffle_bins=False,
        )
        packs = tokens = documents = 0
        for row in packed:
            segments = row["input_ids_segment_ids"]
            packs, tokens, documents = packs + 1, tokens + int((segments > 0).sum()), documents + int(segments.max())
        return packs, tokens, documents

    return pack


def _trl(file: TokenFile, window: int) -> PackAll:
    import pyarrow as pa
    from datasets import Dataset
    from trl import pack_dataset
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    column = pa.ListArray.from_arrays(pa.array(file.edges(), pa.int32()), pa.array(file.tokens()))
    dataset = Dataset(pa.table({"input_ids": column}))
    collate = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)

    def pack() -> tuple[int, int, int]:
        packs = tokens = documents = 0
        # Iterable, so that it packs on the fly (by its default, 1,000 documents at a time) and writes no cache.
        for row in pack_dataset(dataset.to_iterable_dataset(), window, "bfd"):
            batch = collate([row])
            packs, tokens = packs + 1, tokens + batch["input_ids"].shape[1]
            documents += len(batch["cu_seq_lens_q"]) - 1
        return packs, tokens, documents

    return pack


def _axolotl(file: TokenFile, window: int) -> PackAll:
    from axolotl.utils.samplers.multipack import pack_parallel

    logging.getLogger("axolotl").setLevel(logging.WARNING)
    from transformers import DataCollatorWithFlattening

    rows, lengths = TokenRows(file), file.lengths.astype(np.int32)
    collate = DataCollatorWithFlattening()
    pack_parallel(lengths[:100], window, 100_000, 200, num_processes=1)  # numba compiles

    def pack() -> tuple[int, int, int]:
        packs = tokens = documents = 0
        for one in pack_parallel(lengths, window, 100_000, 200, num_processes=1):
            batch = collate([rows[index] for index in one])
            packs, tokens, documents = packs + 1, tokens + batch["input_ids"].shape[1], documents + len(one)
        return packs, tokens, documents

    return pack


STREAM_PACKERS = (
    StreamPacker(f"grain first-fit {GRAIN_BINS}", _grain),
    StreamPacker("trl bfd, padding-free collator", _trl),
    StreamPacker("axolotl multipack, transformers flattening collator", _axolotl),
)
"""In the order of the table."""
