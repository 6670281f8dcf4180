"""How fast the loader packs and tokenises, against public packers that stream tokens.

    packed     documents of 50 to 200 tokens from a tokenised memmap to packs ready to train, one rank, through
               `PackedLoader`: a whole run from the constructor to the last pack, `best_fit`, one worker process; peers
               get the same documents from the same memmap and pack them into the same windows (axolotl's knows all
               lengths beforehand: it is no streaming packer, but the fastest that there is)
    text       jsonl through the loader's reading side only (decode, byte-pair tokenise, shuffle, global batch), with
               0, 1 and 2 workers, against the tokeniser alone

Every variant takes turns in every round; figures are medians over rounds. Peers need `pip install 'evenload[bench]'`
(and axolotl from benchmarks/peers.txt); what is not installed is left out and named.

    python benchmarks/loader.py [--quick] [--append] [--part packed|text]
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from evenload.data.config import DataConfig
from evenload.data.loader import GlobalBatchLoader
from evenload.data.tokenize import FileTokenizer
from evenload.integrations.packed_loader import PackedLoader
from harness import Row, alternate, median_and_spread, ratio_row, run
from loader_peers import STREAM_PACKERS, PackAll, TokenFile
from loader_sources import (
    library_texts,
    short_lengths,
    text_pieces,
    work_directory,
    write_jsonl,
    write_tokenizer,
    write_tokens,
)

OURS = "PackedLoader, with its start"
PACK_WINDOW = 8_192
PACKED_DOCUMENTS = 60_000
BATCH = 4_096
ROUNDS = 3
TEXT_BYTES = 8_000_000


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
    with work_directory() as directory:
        path = directory / "short"
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


def text_config(path: Path, tokenizer: Path, workers: int) -> DataConfig:
    """Texts of many lengths."""
    return DataConfig(
        sources=(str(path),),
        tokenizer=str(tokenizer),
        batch_documents=256,
        shuffle_window=1_024,
        max_document_tokens=32_768,
        epochs=1,
        workers=workers,
    )


def measure_text(quick: bool) -> Iterator[Row]:
    """Documents a second, and the loader's time over the tokeniser's alone."""
    with work_directory() as directory:
        pieces = text_pieces(library_texts())
        path = directory / "texts.jsonl"
        count = write_jsonl(path, pieces, TEXT_BYTES // (10 if quick else 1))
        tokenizer_path = write_tokenizer(directory)
        tokenizer = FileTokenizer(tokenizer_path)
        texts = [pieces[index % len(pieces)] for index in range(count)]

        def read(workers: int) -> None:
            loader = GlobalBatchLoader(text_config(path, tokenizer_path, workers))
            seen = 0
            while (batch := loader.next_batch()) is not None:
                seen += len(batch.documents)
            assert seen == count, (seen, count)

        def tokenise() -> None:
            for start in range(0, count, 64):
                tokenizer.encode_batch(texts[start : start + 64])

        variants: dict[str, Callable[[], object]] = {"tokeniser alone": tokenise}
        variants |= {f"loader, {workers} workers": lambda many=workers: read(many) for workers in (0, 1, 2)}
        seconds = alternate(variants, 1 if quick else 3)
    for name, taken_s in seconds.items():
        case = f"{name}, jsonl of {count:,} texts"
        value, spread = median_and_spread([count / one for one in taken_s])
        yield Row("text", case, "documents per second", value, "1/s", "", spread)
        if name != "tokeniser alone":
            yield ratio_row("text", case, "time", taken_s, seconds["tokeniser alone"], "tokeniser alone")


PARTS = {"packed": measure_packed, "text": measure_text}

if __name__ == "__main__":
    run(PARTS)
