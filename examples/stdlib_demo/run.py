"""`make demo`: plan, measure and train a small Llama on real long-tailed documents.

Documents are the source files of the Python standard library on this machine, one document per file. Four parts: a
tokeniser; `evenload plan`, what a cluster would make of such documents; `evenload bench`, whole documents packed best
fit first against the demo's strategy, measured on this machine beside the predictions; and a training run with the
faster of both, or with the one of demo.toml where the repeats do not tell which is faster.

Five lines say what came out. Every command and all that it said is in runs/demo/details.txt, so that it can be repeated
with other settings.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
from rich.console import Console
from rich.text import Text

from evenload.bench.results import BenchResult
from evenload.config.train_config import TrainConfig, load_train_config
from evenload.data.tokenize import train_byte_pair_tokenizer
from evenload.types.text import counted

HERE = Path(__file__).parent
OUTPUT = Path("runs/demo")
DETAILS = OUTPUT / "details.txt"
STRATEGIES = ("best_fit", "slimpack")
"""The baseline, and the strategy of demo.toml."""
VOCABULARY = 2048
TOKENIZER_BYTES = 2_000_000
# A model and a cluster of usual size, with the demo's documents.
PLAN = (
    *("--model", "llama-7b", "--cluster", "h100x32", "--layout", "dp=4,pp=8"),
    *("--context", "16k", "--documents", "512", "--strategy", "best_fit,balanced,slimpack,auto"),
)
BATCHES, ROUNDS = 3, 3
# Of the terminal that details are written for.
WIDTH = 120


def main() -> None:
    """Tokeniser, plan, bench, training; then what came out."""
    started_s = time.perf_counter()
    progress = Console(stderr=True, highlight=False)
    # Every demo starts anew; only its own output is removed.
    shutil.rmtree(OUTPUT, ignore_errors=True)
    OUTPUT.mkdir(parents=True, exist_ok=True)
    tell(progress, "1 of 4: a tokeniser for Python source (about 3 minutes in all on two free cores, no download)")
    path, settings, answer = write_config(OUTPUT / "config.toml"), sys.argv[1:], OUTPUT / "bench.json"
    tell(progress, "2 of 4: planning such documents for a model of 7B parameters and 32 GPUs")
    run("plan", str(path), *PLAN, "--html", str(OUTPUT / "plan.html"))
    tell(progress, "3 of 4: the same batches under both strategies, measured step by step in turn on this machine")
    files = ("--json", str(answer), "--html", str(OUTPUT / "bench.html"))
    sizes = ("--steps", str(BATCHES), "--rounds", str(ROUNDS))
    run("bench", str(path), *settings, "--strategy", ",".join(STRATEGIES), *sizes, *files)
    result = msgspec.json.decode(answer.read_bytes(), type=BenchResult)
    config = load_train_config(path, settings)
    strategy = result.winner or config.plan.strategy
    tell(progress, f"4 of 4: training with {strategy}")
    run("train", str(path), *settings, f"plan.strategy={strategy}")
    tell(progress, "")
    for line in first_screen(result, config, time.perf_counter() - started_s):
        Console(highlight=False).print(Text(line), soft_wrap=True)


def first_screen(result: BenchResult, config: TrainConfig, seconds: float) -> list[str]:
    """Five lines, the result first; nothing that the spread of what was measured does not support."""
    interval, held = result.compare_with_interval()
    (ratio,) = result.ratios
    if held:
        steps = (
            f"{held} step times in their 90 % interval, {interval.low:.2f} to {interval.high:.2f} times the predicted"
        )
    else:
        steps = "this machine was too busy to hold step times against predictions"
    directory = Path(config.train.output_dir)
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    strategy, why = (result.winner, "the faster one") if result.winner else (config.plan.strategy, "as configured")
    parameters = dict(result.facts)["parameters"]
    return [
        f"Measured: {result.outcome}. {ratio.by_round}.",
        f"Predicted: {ratio.predicted:.2f} times as long: {ratio.verdict}; {steps}.",
        f"Trained: a Llama of {parameters} parameters for {counted(len(rows), 'step')} with {strategy} ({why}), loss "
        f"{rows[0]['loss']:.2f} to {rows[-1]['loss']:.2f}.",
        f"Open: {directory / 'report.html'} (training), {OUTPUT / 'bench.html'} (both strategies), "
        f"{OUTPUT / 'plan.html'} (a cluster); details: {DETAILS} ({seconds:.0f} s).",
        "Next: .venv/bin/evenload plan DOCUMENTS --model llama-7b --cluster h100x32 --context 16k (docs/tutorial.md).",
    ]


def tell(progress: Console, line: str) -> None:
    """Which part begins; in a terminal in place of the part before, so that the result is the first screen."""
    if progress.is_terminal:
        progress.file.write(f"\r\x1b[K{line[: progress.width - 1]}")
        progress.file.flush()
    elif line:
        progress.print(Text(line), soft_wrap=True)


def write_config(path: Path) -> Path:
    """demo.toml with this machine's library and a tokeniser trained on it, which is left beside it."""
    sources, tokenizer = library_sources(), path.with_name("tokenizer.json")
    train_byte_pair_tokenizer(sample_texts(sources), VOCABULARY, tokenizer)
    text = (HERE / "demo.toml").read_text(encoding="utf-8")
    for key, value in (("sources", sources), ("tokenizer", str(tokenizer))):
        (line,) = (line for line in text.splitlines() if line.startswith(f"{key} = "))
        text = text.replace(line, f"{key} = {json.dumps(value)}")
    path.write_text(text, encoding="utf-8")
    return path


def library_sources() -> list[str]:
    """Everything of the standard library except packages installed into it."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "__pycache__"}
    return [str(entry) for entry in sorted(root.iterdir()) if has_source(entry) and entry.name not in skipped]


def has_source(entry: Path) -> bool:
    """A Python file, or a directory that holds some."""
    return entry.suffix == ".py" if entry.is_file() else any(entry.rglob("*.py"))


def sample_texts(sources: list[str]) -> Iterator[str]:
    """Texts of about TOKENIZER_BYTES bytes, spread over the library."""
    files = [f for s in sources for f in ([Path(s)] if Path(s).is_file() else sorted(Path(s).rglob("*.py")))]
    left = TOKENIZER_BYTES
    for file in files[:: max(1, len(files) // 200)]:
        text = file.read_text(encoding="utf-8", errors="replace")[: min(left, 40_000)]
        left -= len(text)
        if left <= 0:
            return
        yield text


def run(*arguments: str) -> None:
    """One command of Evenload, as a user would start it, what it says in DETAILS; the demo ends where it fails."""
    with DETAILS.open("a", encoding="utf-8") as details:
        details.write(f"\n$ evenload {shlex.join(arguments)}\n")
        details.flush()
        command, wide = [sys.executable, "-m", "evenload.cli.main", *arguments], os.environ | {"COLUMNS": str(WIDTH)}
        code = subprocess.run(command, check=False, stdout=details, stderr=subprocess.STDOUT, env=wide).returncode
    if code:
        print(f"\nevenload {arguments[0]} failed; the end of {DETAILS}:", file=sys.stderr)
        print(*DETAILS.read_text(encoding="utf-8").splitlines()[-20:], sep="\n", file=sys.stderr)
        sys.exit(code)


if __name__ == "__main__":
    main()
