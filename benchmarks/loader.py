"""How fast the loader packs and tokenises, against public packers that stream tokens.

    packed     documents of 50 to 200 tokens from a tokenised memmap to packs ready to train, one rank: blocks,
               global batch, plan (`best_fit`), its bytes and back (share), validation, exchange, collate, ledger and
               state after every step, one stage after the other; and through `PackedLoader`, started and all;
               peers get the same documents from the same memmap and pack them into the same windows (axolotl's knows
               all lengths beforehand: it is no streaming packer, but the fastest that there is)
    text       jsonl through the loader's reading side only (decode, byte-pair tokenise, shuffle, global batch), with
               0, 1 and 2 workers, against the tokeniser alone

Every variant takes turns in every round; figures are medians over rounds. Peers need `pip install 'evenload[bench]'`
(and axolotl from benchmarks/peers.txt); what is not installed is left out and named.

    python benchmarks/loader.py [--quick] [--append] [--part packed|text]
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from evenload.data.batches import encode_state
from evenload.data.config import DataConfig
from evenload.data.loader import GlobalBatchLoader
from evenload.data.tokenize import FileTokenizer
from evenload.feed.collate import collate_pack
from evenload.feed.step_maker import documents_by_replica, exchange_tokens
from evenload.integrations.packed_loader import PackedLoader
from evenload.plan.problem import PlanOptions
from evenload.stepplan.validate import validate_plan
from evenload.types.plan import decode_plan, encode_plan
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
from setups import planner_for

PACK_WINDOW = 8_192
PACKED_DOCUMENTS = 60_000
BATCHES = (512, 4_096)
WARM_UP_STEPS = 2
PACKED_ROUNDS = 3
TEXT_BYTES = 8_000_000
STAGES = ("batch", "plan", "share", "validate", "exchange", "collate", "state")


def token_config(path: Path, batch: int, workers: int) -> DataConfig:
    """Short tokenised documents."""
    return DataConfig(
        sources=(str(path.with_suffix(".bin")),),
        format="memmap",
        record="tokens",
        batch_documents=batch,
        shuffle_window=4_096,
        max_document_tokens=PACK_WINDOW,
        epochs=1,
        workers=workers,
    )


class PackedStream:
    """What a rank does for every step, with the seconds of each stage. Documents come from an endless stream."""

    def __init__(self, path: Path, batch: int, workers: int) -> None:
        self._loader = GlobalBatchLoader(token_config(path, batch, workers))
        self._planner = planner_for("llama-7b", "h100x1", {}, PlanOptions(max_pack_tokens=PACK_WINDOW), limited=False)
        self.stage_s = dict.fromkeys(STAGES, 0.0)
        self.documents = self.tokens = self.packs = 0

    def run(self) -> None:
        """To the end of the epoch; the first steps, in which blocks still grow, do not count."""
        steps = self._steps()
        for _ in range(WARM_UP_STEPS):
            next(steps)
        self.stage_s = dict.fromkeys(STAGES, 0.0)
        self.documents = self.tokens = self.packs = 0
        for _ in steps:
            pass
        self._loader.check_ledger()

    def _steps(self) -> Iterator[None]:
        loader = self._loader
        while True:
            marks = [time.perf_counter()]
            batch = loader.next_batch()
            if batch is None:
                return
            marks.append(time.perf_counter())
            plan = self._planner.plan(batch.step, batch.documents, "best_fit")
            marks.append(time.perf_counter())
            plan = decode_plan(encode_plan(plan))
            marks.append(time.perf_counter())
            validate_plan(plan, max_pack_tokens=PACK_WINDOW)
            marks.append(time.perf_counter())
            tokens = exchange_tokens(batch, documents_by_replica(plan), loader.peers)
            marks.append(time.perf_counter())
            packs = [collate_pack(pack, tokens) for pack in plan.pack_plans[0].forward]
            marks.append(time.perf_counter())
            loader.note_step(batch, plan)
            encode_state(loader.state())
            marks.append(time.perf_counter())
            for stage, start_s, stop_s in zip(STAGES, marks, marks[1:], strict=False):
                self.stage_s[stage] += stop_s - start_s
            self.documents += len(batch.documents)
            self.tokens += sum(pack.num_tokens for pack in packs)
            self.packs += len(packs)
            yield


def pack_with_packed_loader(path: Path) -> tuple[int, int, int]:
    """Packs everything as a training loop of somebody else would get it; (packs, tokens, documents)."""
    config = token_config(path, BATCHES[-1], 1)
    packs = tokens = documents = 0
    with PackedLoader(config, max_tokens=PACK_WINDOW, strategy="best_fit", format="pack") as loader:
        for pack in loader:
            packs, tokens, documents = packs + 1, tokens + pack.num_tokens, documents + len(pack.doc_ids)
    return packs, tokens, documents


def measure_packed(quick: bool) -> Iterator[Row]:
    """Documents a second, from the memmap to packs, and ours over each peer's."""
    lengths = short_lengths((WARM_UP_STEPS + 1) * BATCHES[-1] if quick else PACKED_DOCUMENTS)
    with work_directory() as directory:
        path = directory / "short"
        write_tokens(path, lengths)
        file = TokenFile(path, lengths)
        rates: dict[str, list[float]] = {}
        stages: dict[str, list[PackedStream]] = {}
        fills: dict[str, float] = {}
        packers: dict[str, PackAll] = {"PackedLoader, with its start": lambda: pack_with_packed_loader(path)}
        for packer in STREAM_PACKERS:
            try:
                packers[packer.name] = packer.load(file, PACK_WINDOW)
            except ImportError as error:
                print(f"left out: {packer.name}: {error}")
        for repeat in range(1 + (1 if quick else PACKED_ROUNDS)):
            for batch in BATCHES:
                for workers in (0, 1):
                    name = f"evenload, batch {batch:,}, {workers} workers"
                    stream = PackedStream(path, batch, workers)
                    stream.run()
                    if repeat:
                        rates.setdefault(name, []).append(stream.documents / sum(stream.stage_s.values()))
                        stages.setdefault(name, []).append(stream)
                        fills[name] = stream.tokens / (stream.packs * PACK_WINDOW)
            for name, pack in packers.items():
                start_s = time.perf_counter()
                packs, tokens, packed = pack()
                taken_s = time.perf_counter() - start_s
                if packed != len(lengths) or tokens != int(lengths.sum()):
                    raise ValueError(f"{name} packed {packed} documents of {tokens} tokens, not all of them")
                if repeat:
                    rates.setdefault(name, []).append(len(lengths) / taken_s)
                    fills[name] = tokens / (packs * PACK_WINDOW)
    ours = f"evenload, batch {BATCHES[-1]:,}, 1 workers"
    for name, values in rates.items():
        rate, spread = median_and_spread(values)
        yield Row("packed", name, "documents per second", rate, "1/s", "", spread)
        yield Row("packed", name, "fill", fills[name], "share", f"packs of {PACK_WINDOW:,} tokens")
        if name not in stages:
            yield ratio_row("packed", name, "rate of ours", rates[ours], values, ours)
    for name, streams in stages.items():
        for stage in STAGES:
            shares = [one.stage_s[stage] / sum(one.stage_s.values()) for one in streams]
            value, spread = median_and_spread(shares)
            yield Row("packed", name, f"time: {stage}", value, "share", "the rank's thread", spread)


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
