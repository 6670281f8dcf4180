"""How fast the loader plans, packs and tokenises, beside public packers that stream tokens.

    planned    lengths only: best-fit and longest-first packing calls alone, and `StepPlanner.propose` (assignment,
               packs, prices, schedules, simulation, choice, sealed plan), DP 8, packs of 32K tokens, lognormal lengths
    packed     documents of 50 to 200 tokens from a tokenised memmap to packs ready to train, one rank: blocks,
               global batch, plan (`best_fit`), its bytes and back (share), validation, exchange, collate, ledger and
               state after every step, one stage after the other; and through `PackedLoader`, started and all;
               peers get the same documents from the same memmap and pack them into the same windows (axolotl's knows
               all lengths beforehand: it is no streaming packer, but the fastest that there is)
    text       jsonl through the loader's reading side only (decode, byte-pair tokenise, shuffle, global batch), with
               0, 1 and 2 workers, against the tokeniser alone

Every variant takes turns in every round; figures are medians over rounds. Peers need `pip install 'evenload[bench]'`
(and axolotl from benchmarks/peers.txt); what is not installed is left out and named.

    python benchmarks/loader_rates.py [--quick] [--append] [--part planned|packed|text]
"""

import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from evenload.cost.analytic import analytic_coefficients
from evenload.data.batches import encode_state
from evenload.data.config import DataConfig
from evenload.data.hub import model_from
from evenload.data.loader import GlobalBatchLoader
from evenload.data.tokenize import FileTokenizer
from evenload.feed.collate import collate_pack
from evenload.feed.step_maker import documents_by_replica, exchange_tokens
from evenload.integrations.packed_loader import PackedLoader
from evenload.plan.packing.bin_packing import best_fit_decreasing, longest_first
from evenload.plan.planner import StepPlanner
from evenload.plan.problem.options import PlanOptions
from evenload.stepplan.validate import validate_plan
from evenload.types.cluster_catalog import cluster_from
from evenload.types.document import Document
from evenload.types.layout import even_layout
from evenload.types.plan import decode_plan, encode_plan
from loader_peers import STREAM_PACKERS, PackAll, TokenFile
from loader_rows import LoaderRow, median_and_spread, ratio_row, run_benchmark
from loader_sources import (
    library_texts,
    short_lengths,
    text_pieces,
    work_directory,
    write_jsonl,
    write_tokenizer,
    write_tokens,
)
from planners import lognormal_lengths
from results import interleaved_seconds

ROUNDS, QUICK_ROUNDS = 5, 1
DP = 8
PLAN_WINDOW = 32_768
PLANNED_DOCUMENTS = (512, 4_096, 65_536)
SLOW_STRATEGIES = {"slimpack": 4_096}
"""Strategies whose largest batch is smaller: a loader plans thousands of documents a step with them, not 65,536."""

PACK_WINDOW = 8_192
PACKED_DOCUMENTS = 60_000
BATCHES = (512, 4_096)
WARM_UP_STEPS = 2
PACKED_ROUNDS = 3

TEXT_BYTES = 8_000_000
STAGES = ("batch", "plan", "share", "validate", "exchange", "collate", "state")


def measure_planned(quick: bool) -> list[LoaderRow]:
    """Lengths a second."""
    model, cluster = model_from("llama-7b"), cluster_from(f"h100x{DP}")
    layout = even_layout(model.num_layers, dp=DP)
    coefficients = analytic_coefficients(model, cluster, layout)
    planner = StepPlanner(model, coefficients, layout, None, PlanOptions(max_pack_tokens=PLAN_WINDOW), host="unlimited")
    rows = []
    for count in PLANNED_DOCUMENTS[:2] if quick else PLANNED_DOCUMENTS:
        lengths = lognormal_lengths(count)
        documents = tuple(
            Document(doc_id=index, num_tokens=size, num_label_tokens=size - 1)
            for index, size in enumerate(lengths.tolist())
        )
        work_s = planner.costs.document_seconds(lengths, None)
        packs = -(-int(lengths.sum()) // PLAN_WINDOW) + DP
        variants: dict[str, Callable[[], object]] = {
            "best-fit packing": lambda sizes=lengths: best_fit_decreasing(sizes, PLAN_WINDOW),
            "balanced packing": lambda work=work_s, many=packs, sizes=lengths: longest_first(
                work, many, num_tokens=sizes, capacity=PLAN_WINDOW
            ),
        }
        for strategy in ("best_fit", "balanced", "wlb", "slimpack"):
            if count <= SLOW_STRATEGIES.get(strategy, count):
                variants[strategy] = lambda batch=documents, name=strategy: planner.propose(0, batch, name)
        seconds = interleaved_seconds(variants, QUICK_ROUNDS if quick else ROUNDS)
        for name, taken_s in seconds.items():
            rate, spread = median_and_spread([count / one for one in taken_s])
            rows.append(LoaderRow("planned", f"{name}, {count:,} documents", "lengths per second", rate, "1/s", spread))
            if name not in ("best_fit", "best-fit packing"):
                case = f"{name}, {count:,} documents"
                base = "best-fit packing" if name.endswith("packing") else "best_fit"
                rows.append(ratio_row("planned", case, "time", taken_s, seconds[base], base))
    return rows


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


def single_planner() -> StepPlanner:
    """For one rank."""
    model, cluster = model_from("llama-7b"), cluster_from("h100x1")
    layout = even_layout(model.num_layers)
    options = PlanOptions(max_pack_tokens=PACK_WINDOW)
    return StepPlanner(model, analytic_coefficients(model, cluster, layout), layout, None, options, host="unlimited")


class PackedStream:
    """What a rank does for every step, with the seconds of each stage. Documents come from an endless stream."""

    def __init__(self, path: Path, batch: int, workers: int) -> None:
        self._loader = GlobalBatchLoader(token_config(path, batch, workers))
        self._planner = single_planner()
        self.stage_s = dict.fromkeys(STAGES, 0.0)
        self.cpu_s = 0.0
        self.documents = self.tokens = self.packs = 0

    def run(self) -> None:
        """To the end of the epoch; the first steps, in which blocks still grow, do not count."""
        steps = self._steps()
        for _ in range(WARM_UP_STEPS):
            next(steps)
        self.stage_s = dict.fromkeys(STAGES, 0.0)
        self.documents = self.tokens = self.packs = 0
        cpu_start_s = time.process_time()
        for _ in steps:
            pass
        self.cpu_s = time.process_time() - cpu_start_s
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


def measure_packed(quick: bool) -> list[LoaderRow]:
    """Documents a second, from the memmap to packs."""
    lengths = short_lengths((WARM_UP_STEPS + 1) * BATCHES[-1] if quick else PACKED_DOCUMENTS)
    rows: list[LoaderRow] = []
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
        for repeat in range(1 + (QUICK_ROUNDS if quick else PACKED_ROUNDS)):
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
        rows.append(LoaderRow("packed", name, "documents per second", rate, "1/s", spread))
        rows.append(LoaderRow("packed", name, "fill", fills[name], "share", 1.0, f"packs of {PACK_WINDOW:,} tokens"))
        if name not in stages:
            rows.append(ratio_row("packed", ours, f"rate, {name}", rates[ours], values, name))
    for name, streams in stages.items():
        for stage in STAGES:
            value, spread = median_and_spread([one.stage_s[stage] / one.documents * 1e6 for one in streams])
            rows.append(LoaderRow("packed", name, f"time: {stage}", value, "us/document", spread))
        cpu = statistics.median(one.cpu_s / one.documents * 1e6 for one in streams)
        rows.append(LoaderRow("packed", name, "time: CPU of the rank", cpu, "us/document"))
    return rows


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


def measure_text(quick: bool) -> list[LoaderRow]:
    """Documents and megabytes a second, with the loader's own work beside the tokeniser's."""
    with work_directory() as directory:
        pieces = text_pieces(library_texts())
        path = directory / "texts.jsonl"
        size_bytes = TEXT_BYTES // (10 if quick else 1)
        count = write_jsonl(path, pieces, size_bytes)
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
        seconds = interleaved_seconds(variants, QUICK_ROUNDS if quick else 3)
    rows = []
    for name, taken_s in seconds.items():
        case = f"{name}, jsonl of {count:,} texts"
        for metric, amount, unit in (("documents per second", count, "1/s"), ("text", size_bytes / 1e6, "MB/s")):
            value, spread = median_and_spread([amount / one for one in taken_s])
            rows.append(LoaderRow("text", case, metric, value, unit, spread))
        if name != "tokeniser alone":
            rows.append(ratio_row("text", case, "time", taken_s, seconds["tokeniser alone"], "tokeniser alone"))
    return rows


PARTS = {"planned": measure_planned, "packed": measure_packed, "text": measure_text}

if __name__ == "__main__":
    run_benchmark(PARTS, "rates of the loader")
