"""How fast the loader packs and tokenises, against public packers that stream tokens.

    packed     documents of 50 to 200 tokens from a tokenised memmap to packs ready to train, one rank, through
               `PackedLoader`: a whole run from the constructor to the last pack, `best_fit`, one worker process; peers
               get the same documents from the same memmap and pack them into the same windows (axolotl's knows all
               lengths beforehand: it is no streaming packer, but the fastest that there is)

Every variant takes turns in every round; figures are medians over rounds. Peers need `pip install 'evenload[bench]'`
(and axolotl from benchmarks/peers.txt); what is not installed is left out and named.

    python benchmarks/loader.py [--quick] [--append]
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from evenload.data.config import DataConfig
from evenload.integrations.packed_loader import PackedLoader
from harness import Row, alternate, median_and_spread, ratio_row, run
from loader_peers import STREAM_PACKERS, PackAll, TokenFile
from loader_sources import short_lengths, write_tokens

OURS = "PackedLoader, with its start"
PACK_WINDOW = 8_192
PACKED_DOCUMENTS = 60_000
BATCH = 4_096
ROUNDS = 3


def token_config(path: Path) -> DataConfig:
    """Short tokenised documents."""
    return DataConfig(
        sources=(str(path.with_suffix(".bin")),),
        format="memmap",
        record="tokens",
        batch_documents=BATCH,
        shuffle_window=4_096,
        max_document_tokens=PACK_WINDOW,
        epochs=1,
        workers=1,
    )


def pack_with_packed_loader(path: Path) -> tuple[int, int, int]:
    """Packs everything as a training loop of somebody else would get it; (packs, tokens, documents)."""
    config = token_config(path)
    packs = tokens = documents = 0
    with PackedLoader(config, max_tokens=PACK_WINDOW, strategy="best_fit", format="pack") as loader:
        for pack in loader:
            packs, tokens, documents = packs + 1, tokens + pack.num_tokens, documents + len(pack.doc_ids)
    return packs, tokens, documents


def measure_packed(quick: bool) -> Iterator[Row]:
    """Documents a second, from the memmap to packs, and ours over each peer's."""
    lengths = short_lengths(3 * BATCH if quick else PACKED_DOCUMENTS)
    with TemporaryDirectory() as directory:
        path = Path(directory) / "short"
        write_tokens(path, lengths)
        file = TokenFile(path, lengths)
        packers: dict[str, PackAll] = {OURS: lambda: pack_with_packed_loader(path)}
        for packer in STREAM_PACKERS:
            try:
                packers[packer.name] = packer.load(file, PACK_WINDOW)
            except ImportError as error:
                print(f"left out: {packer.name}: {error}")
        fills: dict[str, float] = {}

        def checked(name: str) -> None:
            packs, tokens, documents = packers[name]()
            if (documents, tokens) != (len(lengths), int(lengths.sum())):
                raise ValueError(f"{name} packed {documents} documents of {tokens} tokens, not all of them")
            fills[name] = tokens / (packs * PACK_WINDOW)

        seconds = alternate({name: partial(checked, name) for name in packers}, 1 if quick else ROUNDS)
    for name, taken_s in seconds.items():
        rate, spread = median_and_spread([len(lengths) / one for one in taken_s])
        yield Row("packed", name, "documents per second", rate, "1/s", "", spread)
        yield Row("packed", name, "fill", fills[name], "share", f"packs of {PACK_WINDOW:,} tokens")
        if name != OURS:
            yield ratio_row("packed", name, "rate of ours", taken_s, seconds[OURS], OURS)


PARTS = {"packed": measure_packed}

if __name__ == "__main__":
    run(PARTS)
