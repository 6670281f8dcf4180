"""How soon the first batch comes, how much memory a long stream takes, and what a resume costs.

    start     seconds from making the loader to its first batch of 64 documents, each in a process of its own: a jsonl
              of 2 GB, 10,000 small text files, a parquet of 500 MB; also with the process's own start and imports
    memory    peak resident memory of the process and of its workers while they stream the 2 GB to their end, against a
              jsonl of 100 MB; the files are in the page cache, which is not counted
    resume    seconds from `load_state` to the next batch at step 100,000 of a stream of short tokenised documents (8 a
              batch), against replaying all the steps; and half-way through the 2 GB of text. The batch must be the
              one that followed when the state was made.

Texts are bytes tokens: what is measured is the loader, not a tokeniser. Everything is made in a temporary directory
(3 GB) and removed.

    python benchmarks/loader_start.py [--quick] [--append] [--part start|memory|resume]
"""

import json
import os
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from evenload.data.batches import GlobalBatch, decode_state, encode_state
from evenload.data.config import DataConfig
from evenload.data.loader import GlobalBatchLoader
from loader_rows import LoaderRow, median_and_spread, run_benchmark
from loader_sources import (
    library_texts,
    short_lengths,
    text_pieces,
    work_directory,
    write_files,
    write_jsonl,
    write_parquet,
    write_tokens,
)

LARGE_BYTES, SMALL_BYTES, PARQUET_BYTES, FILES = 2_000_000_000, 100_000_000, 500_000_000, 10_000
QUICK_SHARE = 100
REPEATS, QUICK_REPEATS = 5, 1
WORKERS = (0, 1, 2)
STEPS, STEP_DOCUMENTS = 100_000, 8
SAMPLE_S = 0.02
MIB = 1 << 20


def text_config(source: Path, workers: int, **changes: Any) -> DataConfig:
    """Texts as bytes, cut at 32K."""
    settings: dict[str, Any] = {
        "sources": (str(source),),
        "batch_documents": 64,
        "shuffle_window": 1_024,
        "max_document_tokens": 32_768,
        "overlong": "split",
        "epochs": 1,
        "workers": workers,
    }
    return DataConfig(**(settings | changes))


def step_config(path: Path) -> DataConfig:
    """Many short documents, few a batch."""
    return DataConfig(
        sources=(str(path.with_suffix(".bin")),),
        format="memmap",
        record="tokens",
        batch_documents=STEP_DOCUMENTS,
        shuffle_window=1_024,
        max_document_tokens=64,
        epochs=1,
        workers=0,
    )


def measure_start(quick: bool) -> list[LoaderRow]:
    """Every source, every number of workers."""
    share = QUICK_SHARE if quick else 1
    rows = []
    with work_directory() as directory:
        pieces = text_pieces(library_texts(20_000_000))
        write_jsonl(directory / "large.jsonl", pieces, LARGE_BYTES // share)
        write_files(directory / "files", pieces, FILES // share)
        write_parquet(directory / "rows.parquet", pieces, PARQUET_BYTES // share)
        names = {
            f"jsonl of {LARGE_BYTES // share / 1e9:g} GB": directory / "large.jsonl",
            f"{FILES // share:,} text files": directory / "files",
            f"parquet of {PARQUET_BYTES // share / 1e6:g} MB": directory / "rows.parquet",
        }
        for name, source in names.items():
            for workers in WORKERS:
                answers = [_child("start", source, workers) for _ in range(QUICK_REPEATS if quick else REPEATS)]
                case = f"{name}, {workers} workers"
                for metric, key in (("start to first batch", "loader_s"), ("with imports", "process_s")):
                    value, spread = median_and_spread([answer[key] for answer in answers])
                    rows.append(LoaderRow("start", case, metric, value, "s", spread))
    return rows


def measure_memory(quick: bool) -> list[LoaderRow]:
    """Peaks over a whole stream."""
    share = QUICK_SHARE if quick else 1
    rows = []
    with work_directory() as directory:
        pieces = text_pieces(library_texts(20_000_000))
        for name, size_bytes in (("small", SMALL_BYTES // share), ("large", LARGE_BYTES // share)):
            write_jsonl(directory / f"{name}.jsonl", pieces, size_bytes)
        for workers in WORKERS:
            small, large = (_child("memory", directory / f"{name}.jsonl", workers) for name in ("small", "large"))
            case = f"jsonl of {LARGE_BYTES // share / 1e9:g} GB, {workers} workers"
            base = f"jsonl of {SMALL_BYTES // share / 1e6:g} MB"
            rows.append(LoaderRow("memory", case, "peak, all processes", large["peak_bytes"] / MIB, "MiB"))
            ratio = large["peak_bytes"] / small["peak_bytes"]
            rows.append(LoaderRow("memory", case, "peak", ratio, "x", 1.0, base))
            growth = (large["peak_bytes"] - large["idle_bytes"]) / MIB
            rows.append(LoaderRow("memory", case, "peak over idle processes", growth, "MiB"))
            late = large["late_peak_bytes"] / large["early_peak_bytes"]
            rows.append(LoaderRow("memory", case, "peak of second half", late, "x", 1.0, "peak of first half"))
            rows.append(LoaderRow("memory", case, "streamed", large["bytes"] / large["seconds"] / 1e6, "MB/s"))
    return rows


def measure_resume(quick: bool) -> list[LoaderRow]:
    """At a late step of short documents, and inside a large file."""
    steps, share = (STEPS // QUICK_SHARE, QUICK_SHARE) if quick else (STEPS, 1)
    rows = []
    with work_directory() as directory:
        path = directory / "tokens"
        write_tokens(path, short_lengths((steps + 200) * STEP_DOCUMENTS, 8, 25))
        answer = _child("resume", path, steps)
        case = f"step {steps:,} of {STEP_DOCUMENTS} short documents"
        rows += _resume_rows(case, answer)
        large = directory / "large.jsonl"
        write_jsonl(large, text_pieces(library_texts(20_000_000)), LARGE_BYTES // share)
        rows += _resume_rows(f"half-way through a jsonl of {LARGE_BYTES // share / 1e9:g} GB", _child("half", large, 0))
    return rows


def _resume_rows(case: str, answer: dict[str, Any]) -> list[LoaderRow]:
    value, spread = median_and_spread(answer["resume_s"])
    return [
        LoaderRow("resume", case, "state to next batch", value, "s", spread),
        LoaderRow("resume", case, "replay of all steps", answer["replay_s"], "s"),
        LoaderRow("resume", case, "replay", answer["replay_s"] / value, "x", 1.0, "resume"),
        LoaderRow("resume", case, "size of the state", answer["state_bytes"] / 1024, "KiB"),
    ]


def _child(what: str, source: Path, number: int) -> dict[str, Any]:
    """Measured in a process of its own: nothing is warm but the page cache."""
    start_s = time.perf_counter()
    command = [sys.executable, str(Path(__file__)), "--child", what, str(source), str(number)]
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    answer = json.loads(output)
    return answer | {"process_s": time.perf_counter() - start_s - answer.get("after_s", 0.0)}


def run_child(what: str, source: Path, number: int) -> dict[str, Any]:
    """What `_child` asks for."""
    match what:
        case "start":
            return start_once(text_config(source, number))
        case "memory":
            return stream_memory(text_config(source, number), source)
        case "resume":
            return resume_at(step_config(source), number)
        case "half":
            return resume_at(text_config(source, 0), _half(source))
    raise ValueError(what)


def start_once(config: DataConfig) -> dict[str, Any]:
    """Seconds to the first batch."""
    start_s = time.perf_counter()
    loader = GlobalBatchLoader(config)
    batch = loader.next_batch()
    assert batch is not None
    ready_s = time.perf_counter()
    loader.close()
    return {"loader_s": ready_s - start_s, "after_s": time.perf_counter() - ready_s}


class PeakMemory:
    """Resident memory of this process and its children, sampled by a thread."""

    def __init__(self) -> None:
        self.samples: list[tuple[float, int]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "PeakMemory":
        self._note()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._note()

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            self._note()

    def _note(self) -> None:
        self.samples.append((time.perf_counter(), resident_bytes()))


def resident_bytes() -> int:
    """Of this process and its children."""
    return sum(_resident_of(pid) for pid in (os.getpid(), *_children()))


def _children() -> Iterator[int]:
    for thread in Path("/proc/self/task").iterdir():
        try:
            yield from map(int, (thread / "children").read_text().split())
        except FileNotFoundError:  # a thread that has ended
            continue


def _resident_of(pid: int) -> int:
    # Without pages of files: a mapped file's belong to the page cache.
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def stream_memory(config: DataConfig, source: Path) -> dict[str, Any]:
    """Peak while reading everything once."""
    loader = GlobalBatchLoader(config)
    first = loader.next_batch()
    assert first is not None
    idle_bytes = resident_bytes()
    start_s = time.perf_counter()
    with PeakMemory() as memory:
        while loader.next_batch() is not None:
            pass
        stop_s = time.perf_counter()
    middle_s = (start_s + stop_s) / 2
    early = [size for at_s, size in memory.samples if at_s < middle_s]
    late = [size for at_s, size in memory.samples if at_s >= middle_s]
    return {
        "idle_bytes": idle_bytes,
        "peak_bytes": max(early + late),
        "early_peak_bytes": max(early),
        "late_peak_bytes": max(late),
        "bytes": source.stat().st_size,
        "seconds": stop_s - start_s,
    }


def _half(source: Path) -> int:
    """How many batches half of a jsonl makes."""
    with source.open("rb") as file:
        return sum(1 for _ in file) // 2 // 64


def resume_at(config: DataConfig, steps: int) -> dict[str, Any]:
    """Seconds to go on after so many steps, and to go there again from the beginning."""
    loader = GlobalBatchLoader(config)
    start_s = time.perf_counter()
    for _ in range(steps):
        assert loader.next_batch() is not None
    replay_s = time.perf_counter() - start_s
    # Batches that were handed out and not noted are in flight in the ledger, and come no more: as after a kill.
    saved = encode_state(loader.state())
    expected = _checksum(loader.next_batch())
    loader.close()
    resume_s = []
    for _ in range(REPEATS):
        start_s = time.perf_counter()
        again = GlobalBatchLoader(config)
        again.load_state(decode_state(saved))
        batch = again.next_batch()
        resume_s.append(time.perf_counter() - start_s)
        assert _checksum(batch) == expected, "the resumed stream went on with another batch"
        again.close()
    return {"resume_s": resume_s, "replay_s": replay_s, "state_bytes": len(saved)}


def _checksum(batch: GlobalBatch | None) -> tuple[int, int]:
    assert batch is not None
    content = b"".join(batch.tokens[document.doc_id].tobytes() for document in batch.documents)
    return batch.step, zlib.crc32(content)


PARTS = {"start": measure_start, "memory": measure_memory, "resume": measure_resume}

if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(run_child(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))))
    else:
        run_benchmark(PARTS, "start, memory and resume of the loader")
