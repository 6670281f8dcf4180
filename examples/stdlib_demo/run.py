"""`make demo`: plan, measure and train a small Llama on real long-tailed documents.

Documents are the source files of the Python standard library on this machine, one document per file. Four parts: a
tokeniser; `evenload plan`, what a cluster would make of such documents; `evenload bench`, whole documents packed best
fit first against the demo's strategy, measured on this machine beside the predictions; and a training run with the
faster of both. Every command is printed, so that it can be repeated with other settings.
"""

import json
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

from evenload.bench.runs import BenchResult
from evenload.data.encoding.tokenize import train_byte_pair_tokenizer

HERE = Path(__file__).parent
OUTPUT = Path("runs/demo")
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
EXPECTED = (
    "About 3 minutes on two free cores; nothing is downloaded. Expected: best_fit takes 1.15 to 1.45 times as long as "
    "slimpack, measured as well as predicted: a pipeline of two stages with few, uneven packs leaves each stage "
    "waiting for the other. Other programs on the machine slow both alike; the column spread says how much."
)


def main() -> None:
    """Tokeniser, plan, bench, training."""
    started_s = time.perf_counter()
    console = Console(highlight=False)
    console.print(Text(EXPECTED), soft_wrap=True)
    # Every demo starts anew; only its own output is removed.
    shutil.rmtree(OUTPUT, ignore_errors=True)
    OUTPUT.mkdir(parents=True, exist_ok=True)
    console.rule("1/4  a tokeniser for Python source")
    config = write_config(OUTPUT / "config.toml")
    console.print(
        f"{VOCABULARY:,} tokens, trained on {TOKENIZER_BYTES / 1e6:.0f} MB of this machine's Python library; "
        f"settings: {config}"
    )
    console.rule("2/4  planned: such documents, a model of 7B parameters and 32 GPUs (predicted, needs no GPU)")
    run(console, "plan", str(config), *PLAN, "--html", str(OUTPUT / "plan.html"))

    console.rule("3/4  measured: the same batches under both strategies, step by step in turn, on this machine")
    settings = sys.argv[1:]
    answer = OUTPUT / "bench.json"
    files = ("--json", str(answer), "--html", str(OUTPUT / "bench.html"))
    sizes = ("--steps", str(BATCHES), "--rounds", str(ROUNDS))
    run(console, "bench", str(config), *settings, "--strategy", ",".join(STRATEGIES), *sizes, *files)
    result = msgspec.json.decode(answer.read_bytes(), type=BenchResult)
    fastest = min(result.runs, key=lambda one: one.measured_s).strategy

    console.rule(f"4/4  training with the faster one, {fastest}")
    run(console, "train", str(config), *settings, f"plan.strategy={fastest}")
    console.print(
        Text(
            f"\nopen in a browser: {OUTPUT / 'bench.html'} (both strategies, predicted and measured), "
            f"{OUTPUT / 'report.html'} (the training), {OUTPUT / 'plan.html'} (the cluster); "
            f"{OUTPUT / 'trace.json'} at ui.perfetto.dev ({time.perf_counter() - started_s:.0f} s in all)"
        ),
        soft_wrap=True,
    )


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


def run(console: Console, *arguments: str) -> None:
    """One command of Evenload, as a user would start it; the demo ends where it fails."""
    console.print(Text(f"$ evenload {shlex.join(arguments)}", style="bold"), soft_wrap=True)
    code = subprocess.run([sys.executable, "-m", "evenload.cli.main", *arguments], check=False).returncode
    if code:
        sys.exit(code)


if __name__ == "__main__":
    main()
