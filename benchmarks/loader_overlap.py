"""How long training waits for its data: `evenload train` with steps prepared ahead, and with the step asking for them.

Two processes (pp = 2) on this machine, `slimpack`, the model of examples/stdlib_demo. `demo`: the standard library's
files as in `make demo`, tokenised while training runs. `skewed`: tokenised documents with the lengths of
`examples/lengths/github_dirs.npy.gz`, divided by 8 and cut at 8,192. Waiting is `data_wait_s` of metrics.jsonl, the
longest of all ranks, over the step's time; the first step, which nothing can prepare, is left out.

    prefetch 2            data.prefetch_steps = 2, data.workers = 1 (the defaults)
    synchronous           data.prefetch_steps = 0, data.workers = 1: one block of each stream is still read ahead
    synchronous, thread   data.prefetch_steps = 0, data.workers = 0

    python benchmarks/loader_overlap.py [--quick] [--append] [--part demo|skewed]
"""

import functools
import statistics
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np

from evenload.data.lengths import read_lengths
from evenload.report.run_files import latest_per_step, read_metrics
from loader_rows import LoaderRow, run_benchmark
from loader_sources import library_texts, work_directory, write_tokens
from loader_training import LENGTHS

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "examples" / "stdlib_demo"
STEPS, QUICK_STEPS = {"demo": 5, "skewed": 8}, 3
CONTEXT, SCALE = 8_192, 8
VOCABULARY = 2_048
VARIANTS = {
    "prefetch 2": ("data.prefetch_steps=2", "data.workers=1"),
    "synchronous": ("data.prefetch_steps=0", "data.workers=1"),
    "synchronous, thread": ("data.prefetch_steps=0", "data.workers=0"),
}


def demo_settings(directory: Path) -> list[str]:
    """The demo's data: whole packages of the standard library, and a tokeniser made from it."""
    from evenload.data.tokenize import train_byte_pair_tokenizer

    tokenizer = directory / "tokenizer.json"
    train_byte_pair_tokenizer(library_texts(1_000_000), VOCABULARY, tokenizer)
    root = Path(sysconfig.get_paths()["stdlib"])
    packages = [str(root / name) for name in ("asyncio", "email", "unittest", "distutils", "json", "http")]
    sources = [name for name in packages if Path(name).is_dir()] + sorted(map(str, root.glob("*.py")))
    return [f"data.sources={sources!r}", f"data.tokenizer={tokenizer}"]


def skewed_settings(directory: Path) -> list[str]:
    """Tokenised documents of very different lengths."""
    lengths = np.clip(read_lengths(str(LENGTHS)) // SCALE, 8, CONTEXT).astype(np.int64)[:4_000]
    write_tokens(directory / "skewed", lengths, vocab_size=VOCABULARY)
    sources = [str(directory / "skewed.bin")]
    return [f"data.sources={sources!r}", "data.include=[]", "data.format=memmap", "data.record=tokens"]


def train(settings: list[str], output: Path, steps: int) -> list[dict[str, float]]:
    """Metrics of every step after the first."""
    command = [sys.executable, "-m", "evenload.cli.main", "train", str(DEMO / "demo.toml"), *settings]
    command += [f"train.output_dir={output}", f"train.steps={steps}", "train.export_hf=false"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"evenload train failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return latest_per_step(read_metrics(output / "metrics.jsonl"))[1:]  # type: ignore[return-value]


def measure(name: str, quick: bool) -> list[LoaderRow]:
    """Every variant on one data set."""
    rows: list[LoaderRow] = []
    benchmark = f"overlap {name}"
    steps = QUICK_STEPS if quick else STEPS[name]
    with work_directory() as directory:
        settings = DATA[name](directory)
        step_s = {}
        for index, (variant, changes) in enumerate(VARIANTS.items()):
            metrics = train([*settings, *changes], directory / f"{name}{index}", steps)
            waits = [float(row["data_wait_s"]) for row in metrics]
            times = [float(row["step_time_s"]) for row in metrics]
            step_s[variant] = [wait + time for wait, time in zip(waits, times, strict=True)]
            shares = [wait / time for wait, time in zip(waits, times, strict=True)]
            case = f"{name}, pp=2, slimpack, {variant}, {len(metrics)} steps"
            figures = {
                "data wait, median": statistics.median(shares),
                "data wait, largest": max(shares),
                "data wait, all steps": sum(waits) / sum(times),
            }
            rows += [
                LoaderRow(benchmark, case, key, value, "share", 1.0, "step time") for key, value in figures.items()
            ]
            rows.append(LoaderRow(benchmark, case, "data wait, median step", statistics.median(waits) * 1e3, "ms"))
            rows.append(LoaderRow(benchmark, case, "step time, median", statistics.median(times) * 1e3, "ms"))
        for variant, taken_s in step_s.items():
            if variant != "prefetch 2":
                ratio = statistics.median(taken_s) / statistics.median(step_s["prefetch 2"])
                case = f"{name}, pp=2, slimpack, {variant}, {steps - 1} steps"
                rows.append(LoaderRow(benchmark, case, "wait and step", ratio, "x", 1.0, "prefetch 2"))
    return rows


DATA = {"demo": demo_settings, "skewed": skewed_settings}
PARTS = {name: functools.partial(measure, name) for name in DATA}

if __name__ == "__main__":
    run_benchmark(PARTS, "waiting for data")
