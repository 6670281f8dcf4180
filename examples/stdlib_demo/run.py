"""`make demo`: train a small Llama on real long-tailed documents, twice, and compare.

Documents are the source files of the Python standard library on this machine, one document per file.
The same steps are trained with SlimPack's slices and with best-fit packing; both measured step times and
both predictions are printed, whatever they are, and runs/demo/report.html shows them side by side.
"""

import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from evenload.cli.run_files import read_run
from evenload.data.encoding.tokenize import train_byte_pair_tokenizer
from evenload.report.html import write_report
from evenload.report.run_figures import comparison_row, typical_meaning
from evenload.report.run_report import RunReport
from evenload.report.table import ComparisonTable

HERE = Path(__file__).parent
OUTPUT = Path("runs/demo")
BASELINE = "best_fit"
VOCABULARY = 2048
TOKENIZER_BYTES = 2_000_000


def main() -> None:
    """Tokeniser, two runs, one report."""
    started_s = time.perf_counter()
    # Wide enough for the table also where the output is not a terminal.
    console = Console(highlight=False, width=max(Console().width, 120))
    sources = library_sources()
    # Every demo starts anew; only its own output is removed.
    shutil.rmtree(OUTPUT, ignore_errors=True)
    OUTPUT.mkdir(parents=True, exist_ok=True)
    tokenizer = OUTPUT / "tokenizer.json"
    console.rule("1/3  a tokeniser for Python source")
    train_byte_pair_tokenizer(sample_texts(sources), VOCABULARY, tokenizer)
    console.print(f"{VOCABULARY:,} tokens, trained on {TOKENIZER_BYTES / 1e6:.0f} MB of this machine's Python library")

    console.rule("2/3  training with slimpack: slices, separate forward and backward MicroPacks, PackFlow")
    train(sources, tokenizer, "slimpack", OUTPUT)
    console.rule(f"3/3  the same steps with {BASELINE}")
    train(sources, tokenizer, BASELINE, OUTPUT / BASELINE, "train.export_hf=false")

    sections, facts = zip(*(read_run(directory) for directory in (OUTPUT, OUTPUT / BASELINE)), strict=True)
    rows = [comparison_row(section) for section in sections]
    best = min(rows, key=lambda row: row["measured_step_time_s"])["name"]
    write_report(
        OUTPUT / "report.html",
        RunReport(
            title="Evenload demo: the Python standard library, two pipeline stages",
            facts=tuple(fact for fact in facts[0].facts if fact[0] not in ("data", "strategy")),
            sections=sections,
            comparison=tuple(rows),
            best=best,
            ledger=facts[0].ledger,
        ),
    )
    console.rule("result")
    show(console, rows, best, typical_meaning(sections[0].metrics))
    console.print("\n".join(["ledger of documents and tokens", *facts[0].ledger]))
    console.print(
        f"\nopen {OUTPUT / 'report.html'} in a browser; {OUTPUT / 'trace.json'} at ui.perfetto.dev "
        f"({time.perf_counter() - started_s:.0f} s in all)"
    )


def library_sources() -> list[str]:
    """Everything of the standard library except packages installed into it."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "__pycache__"}
    return [str(entry) for entry in sorted(root.iterdir()) if has_source(entry) and entry.name not in skipped]


def has_source(entry: Path) -> bool:
    """A Python file, or a directory that holds some."""
    return entry.suffix == ".py" if entry.is_file() else any(entry.rglob("*.py"))


def sample_texts(sources: list[str]):
    """Texts of about TOKENIZER_BYTES bytes, spread over the library."""
    files = [f for s in sources for f in ([Path(s)] if Path(s).is_file() else sorted(Path(s).rglob("*.py")))]
    left = TOKENIZER_BYTES
    for file in files[:: max(1, len(files) // 200)]:
        text = file.read_text(encoding="utf-8", errors="replace")[: min(left, 40_000)]
        left -= len(text)
        if left <= 0:
            return
        yield text


def train(sources: list[str], tokenizer: Path, strategy: str, output: Path, *more: str) -> None:
    """One `evenload train`, as a user would start it."""
    settings = [
        f"data.sources={sources!r}",
        f"data.tokenizer={tokenizer}",
        f"plan.strategy={strategy}",
        f"train.output_dir={output}",
        *more,
        *sys.argv[1:],
    ]
    command = [sys.executable, "-m", "evenload.cli.main", "train", str(HERE / "demo.toml"), *settings]
    code = subprocess.run(command, check=False).returncode
    if code:
        sys.exit(code)


def show(console: Console, rows: list[dict[str, Any]], best: str, meaning: str) -> None:
    """Both runs, measured and predicted."""
    console.print(ComparisonTable(rows, best))
    ours, theirs = rows
    console.print(
        f"measured: {theirs['name']} / {ours['name']} = "
        f"{theirs['measured_step_time_s'] / ours['measured_step_time_s']:.2f}; predicted: "
        f"{theirs['mean_step_time_s'] / ours['mean_step_time_s']:.2f} (of each run {meaning})"
    )


if __name__ == "__main__":
    main()
