"""Strategies measured against their predictions on this machine's cores: the cases of docs/accuracy.md.

Every case is `evenload bench` on a small Llama with random weights: the same two global batches under every strategy,
by real processes, interleaved step by step. Layouts PP2, DP2, CP2 and PP2 x DP2, two tables of lengths
(examples/lengths, scaled down to what two cores train in half a second), two sizes of model. Every case calibrates its
own costs. Prints measured and predicted step and
pack times, and appends rows to benchmarks/accuracy/cpu.csv, with the cost file and batches beside it.

    python benchmarks/measured.py [--case NAME ...] [--list] [--resume] [--dry-run]

All cases take 45 minutes on two quiet cores. --resume leaves out what has quiet rows of this commit already. --dry-run
appends nothing. Then `python tools/make_accuracy.py` makes page, picture and intervals.
"""

import argparse
import gzip
import itertools
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from transformers import LlamaConfig

from evenload.bench.results import BenchResult
from evenload.errors import ConfigError
from evenload.planning.strategies.registry import strategy_named
from evenload.types.layout import even_layout
from evenload.types.text import format_change, format_seconds
from harness import commit_name
from setups import ROOT  # puts tests/support on the path

sys.path.insert(0, str(ROOT / "tools"))
from ledger import append_result, current_rows, read_ledger  # isort: skip
from token_run import save_tokens  # isort: skip

LEDGER = Path(__file__).parent / "accuracy" / "cpu.csv"
STRATEGIES = ("padded", "best_fit", "balanced", "wlb", "skrull", "slimpack", "auto")
BATCHES, ROUNDS = 2, 7
VOCABULARY = 2048
LAYOUTS = {"pp2": {"pp": 2}, "dp2": {"dp": 2}, "cp2": {"cp": 2}, "tp2": {"tp": 2}, "pp2dp2": {"pp": 2, "dp": 2}}
TABLES = {"dirs": "github_dirs", "files": "stdlib"}
"""Of examples/lengths: a long tail of directories, and Python files, which are more alike."""
LEAST_TOKENS = 16


@dataclass(frozen=True)
class Size:
    """A model, and how much of it two cores train in about half a second.

    Args:
        shrink: lengths of a table are divided by it.
        context: longest document and largest pack.
    """

    hidden: int
    layers: int
    batch_tokens: int
    context: int
    shrink: int


SIZES = {
    "small": Size(hidden=256, layers=4, batch_tokens=4096, context=1024, shrink=8),
    "wide": Size(hidden=512, layers=2, batch_tokens=2048, context=512, shrink=16),
}
CASES = tuple("-".join(parts) for parts in itertools.product(LAYOUTS, TABLES, SIZES))
"""Layout, table and size."""
NOISY = "calibration was disturbed"
"""What a run says where its costs are not to be believed."""


def main() -> None:
    """Exit code 1 where a case failed or could not be calibrated; the others have run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=CASES, metavar="NAME", help="one of --list; may be repeated")
    parser.add_argument("--list", action="store_true", help="name all cases")
    parser.add_argument("--resume", action="store_true", help="leave out cases with quiet rows of this commit")
    parser.add_argument("--dry-run", action="store_true", help="append nothing")
    options = parser.parse_args()
    if options.list:
        print("\n".join(CASES))
        return
    done = {row.case for row in read_ledger(LEDGER) if row.is_quiet and row.commit == commit_name()}
    cases = [case for case in options.case or CASES if not (options.resume and case in done)]
    failed = []
    for number, case in enumerate(cases, start=1):
        print(f"\n== {case} ({number} of {len(cases)})", flush=True)
        result = measured(case)
        if result is None:
            failed.append(case)
            continue
        show_packs(result)
        if not options.dry_run:
            print(f"{append_result(LEDGER, result, case, commit_name())} rows appended to {LEDGER.name}")
            forget_superseded()
    if failed:
        sys.exit(f"benchmarks/measured.py: without rows: {', '.join(failed)}; run them again by --case")


def measured(case: str) -> BenchResult | None:
    """Run a case; None where it failed, or where other work disturbed the calibration."""
    with tempfile.TemporaryDirectory() as folder:
        config = write_run(case, Path(folder))
        names, left_out = strategies_of(case)
        for _, why in left_out:
            print(f"left out: {why}")
        answer = Path(folder) / "result.json"
        sizes = ("--steps", str(BATCHES), "--rounds", str(ROUNDS), "--json", str(answer))
        done = subprocess.run(
            [sys.executable, "-m", "evenload.cli.main", "bench", str(config), "--strategy", ",".join(names), *sizes],
            env={**os.environ, "XDG_CACHE_HOME": folder, "COLUMNS": "120"},
            check=False,
            stderr=subprocess.PIPE,
            text=True,
        )
        print(done.stderr, end="", file=sys.stderr, flush=True)
        if done.returncode or NOISY in done.stderr:
            return None
        return msgspec.json.decode(answer.read_bytes(), type=BenchResult)


def strategies_of(case: str) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """Those that the layout of a case can run, and the others with the reason."""
    layout, _, size = case.split("-")
    shape = even_layout(SIZES[size].layers, **LAYOUTS[layout])
    names, left_out = [], []
    for name in STRATEGIES:
        try:
            strategy_named(name).require_layout(shape)
            names.append(name)
        except ConfigError as error:
            left_out.append((name, str(error)))
    return tuple(names), tuple(left_out)


def show_packs(result: BenchResult) -> None:
    """A line a strategy: its packs, and the median one measured and predicted; then the machine's load."""
    for one in result.runs:
        packs = [(run.num_packs, run.packs) for run in one.batches]
        shown = "; ".join(
            f"{count} of {format_seconds(results.measured_s)} (predicted {format_seconds(results.predicted_s)}, "
            f"all together {format_change(results.total)})"
            for count, results in packs
        )
        print(f"packs of {one.strategy:<9} {shown}")
    load = result.load
    print(f"{load.demand:g} computing threads a core; a rank waited {load.waited_share:.1%} of the time beyond that")


def forget_superseded() -> None:
    """Remove the cost files and batches that no current row was predicted from; rows stay."""
    used = {row.inputs for row in current_rows(read_ledger(LEDGER))}
    for kind in ("costs", "inputs"):
        for file in (LEDGER.parent / kind).glob("*.json"):
            if file.stem not in used:
                file.unlink()


def write_run(case: str, directory: Path) -> Path:
    """Model, tokens and config.toml of a case; returns the path of the latter."""
    layout, table, size = case.split("-")
    chosen = SIZES[size]
    lengths = scaled_lengths(table, chosen)
    save_tokens(directory, lengths, VOCABULARY, np.random.default_rng(1))
    LlamaConfig(
        hidden_size=chosen.hidden,
        intermediate_size=chosen.hidden * 11 // 4,
        num_hidden_layers=chosen.layers,
        num_attention_heads=chosen.hidden // 64,
        num_key_value_heads=chosen.hidden // 128,
        vocab_size=VOCABULARY,
        max_position_embeddings=chosen.context,
    ).save_pretrained(directory / "model")
    axes = "\n".join(f"{axis} = {ranks}" for axis, ranks in LAYOUTS[layout].items())
    file = directory / f"{case}.toml"
    file.write_text(
        f"""
[model]
path = "{directory / "model"}"
random_init = true
[data]
sources = ["{directory / "tokens.bin"}"]
record = "tokens"
max_document_tokens = {chosen.context}
batch_tokens = {chosen.batch_tokens}
workers = 0
epochs = 1
[parallel]
{axes}
[train]
output_dir = "{directory / "run"}"
"""
    )
    return file


def scaled_lengths(table: str, size: Size) -> np.ndarray:
    """int64[n]: lengths of a table in the size of a case, enough for its batches."""
    with gzip.open(ROOT / "examples" / "lengths" / f"{TABLES[table]}.npy.gz") as file:
        lengths = np.load(file).astype(np.int64) // size.shrink
    clipped = np.clip(lengths, LEAST_TOKENS, size.context)
    needed = size.batch_tokens * (BATCHES + 1)
    return clipped[: int(np.searchsorted(np.cumsum(clipped), needed)) + 1]


if __name__ == "__main__":
    main()
