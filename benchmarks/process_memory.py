"""Main memory of whole training processes against its prediction, on this machine's CPU: signed errors, a row a case.

Every case is `evenload train` on a small Llama with random weights, by real processes over gloo, two steps; the last
step's `peak_process_bytes` (the most that any process held, Linux's VmHWM, forgotten before every step) is compared
with its `predicted_process_bytes`; beside it stands what the ranks' own count says (`peak_memory_bytes`) and its
prediction.
Prints the table and appends a row a case to benchmarks/accuracy/process_memory.csv. The shares of
`cost.process_memory` were chosen on `one-short`, `one-long` and `one-long-recompute`, its threshold on `one-wide`; the
others are out of sample.

    python benchmarks/process_memory.py [--case NAME ...] [--dry-run]

Sizes are such that weights and activations are a large part of what a process holds; a minute a case at most.
"""

import argparse
import csv
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import msgspec
import numpy as np
from transformers import LlamaConfig

from evenload.config.train_config import BYTES_PER_ELEMENT
from evenload.cost.analytic import analytic_coefficients
from evenload.cost.coefficients import write_coefficients
from evenload.cost.measured_on import MeasuredOn
from evenload.data.hub import model_from
from evenload.report.run_files import read_metrics
from evenload.types.cluster_catalog import cluster_from
from evenload.types.layout import even_layout
from evenload.types.scaled_units import format_bytes
from results import commit_name, cpu_name
from token_runs import save_tokens

LEDGER = Path(__file__).parent / "accuracy" / "process_memory.csv"
COLUMNS = (
    *("date", "commit", "cpu", "torch", "case", "layout", "policy", "dtype", "parameters", "longest", "batch_tokens"),
    *("measured_bytes", "predicted_bytes", "error", "counted_bytes", "predicted_counted_bytes"),
)
STEPS = 2
VOCABULARY = 4096


@dataclass(frozen=True)
class Case:
    """A model, its documents, and how it is trained.

    Args:
        longest: tokens of the longest document; the others are of random lengths below it.
        batch: documents of a step.
    """

    hidden: int
    layers: int
    longest: int
    batch: int
    policy: str = "replay"
    dtype: str = "float32"
    strategy: str = "slimpack"
    sizes: dict[str, int] = field(default_factory=dict)


CASES = {
    "one-short": Case(hidden=512, layers=4, longest=256, batch=8),
    "one-long": Case(hidden=256, layers=4, longest=4096, batch=2),
    "one-long-recompute": Case(hidden=256, layers=4, longest=4096, batch=2, policy="recompute"),
    "one-wide": Case(hidden=1024, layers=2, longest=512, batch=3),
    "one-bf16": Case(hidden=512, layers=4, longest=512, batch=4, dtype="bfloat16"),
    "one-best-fit": Case(hidden=512, layers=4, longest=1024, batch=4, strategy="best_fit"),
    "pp2": Case(hidden=512, layers=6, longest=1024, batch=4, sizes={"pp": 2}),
    "pp2-recompute": Case(hidden=512, layers=6, longest=1024, batch=4, policy="recompute", sizes={"pp": 2}),
    "dp2": Case(hidden=512, layers=4, longest=1024, batch=4, sizes={"dp": 2}),
    "cp2": Case(hidden=256, layers=4, longest=4096, batch=2, sizes={"cp": 2}),
    "tp2": Case(hidden=512, layers=4, longest=1024, batch=3, sizes={"tp": 2}),
    "pp2dp2": Case(hidden=512, layers=4, longest=512, batch=6, sizes={"pp": 2, "dp": 2}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=tuple(CASES), metavar="NAME", help=", ".join(CASES))
    parser.add_argument("--dry-run", action="store_true", help="append nothing")
    asked = parser.parse_args()
    rows = []
    for name in asked.case or CASES:
        row = measured(name, CASES[name])
        rows.append(row)
        if not asked.dry_run:
            append(row)
        print(
            f"{name:<20} measured {format_bytes(row['measured_bytes']):>9}  predicted "
            f"{format_bytes(row['predicted_bytes']):>9}  {row['error']:+7.1%}   of it counted by the store "
            f"{format_bytes(row['counted_bytes'])}, predicted {format_bytes(row['predicted_counted_bytes'])}",
            flush=True,
        )
    errors = [row["error"] for row in rows]
    print(
        f"{len(rows)} cases: median of absolute errors {statistics.median(map(abs, errors)):.1%}, worst "
        f"{max(errors, key=abs):+.1%}, mean {statistics.mean(errors):+.1%}"
    )


def measured(name: str, case: Case) -> dict:
    """Train a case in processes of its own and compare its last step."""
    with tempfile.TemporaryDirectory() as folder:
        lengths = write_run(name, case, Path(folder))
        done = subprocess.run(
            [sys.executable, "-m", "evenload.cli.main", "train", str(Path(folder) / "config.toml")],
            check=False,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            sys.exit(f"{name}: evenload train ended with exit code {done.returncode}\n{done.stderr}")
        row = read_metrics(Path(folder) / "run" / "metrics.jsonl")[-1]
    found, predicted = int(row["peak_process_bytes"] or 0), int(row["predicted_process_bytes"] or 0)
    parameters = 12 * case.layers * case.hidden**2 + 2 * VOCABULARY * case.hidden
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit_name(),
        "cpu": cpu_name(),
        "torch": version("torch"),
        "case": name,
        "layout": row["layout"],
        "policy": case.policy,
        "dtype": case.dtype,
        "parameters": parameters,
        "longest": int(max(lengths)),
        "batch_tokens": row["tokens"],
        "measured_bytes": found,
        "predicted_bytes": predicted,
        "error": predicted / found - 1,
        "counted_bytes": row["peak_memory_bytes"],
        "predicted_counted_bytes": row["predicted_peak_memory_bytes"],
    }


def write_run(name: str, case: Case, directory: Path) -> np.ndarray:
    """Model, tokens and config.toml; returns the lengths of the documents."""
    rng = np.random.default_rng(len(name))
    lengths = rng.integers(case.longest // 8, case.longest, case.batch * STEPS)
    lengths[:: case.batch] = case.longest
    save_tokens(directory, lengths, VOCABULARY, rng)
    config = LlamaConfig(
        hidden_size=case.hidden,
        intermediate_size=case.hidden * 11 // 4,
        num_hidden_layers=case.layers,
        num_attention_heads=case.hidden // 64,
        num_key_value_heads=case.hidden // 128,
        vocab_size=VOCABULARY,
        max_position_embeddings=case.longest,
    )
    config.save_pretrained(directory / "model")
    write_costs(directory, case)
    axes = "\n".join(f"{axis} = {ranks}" for axis, ranks in case.sizes.items())
    (directory / "config.toml").write_text(
        f"""
[model]
path = "{directory / "model"}"
random_init = true
dtype = "{case.dtype}"
[data]
sources = ["{directory / "tokens.npy"}"]
record = "tokens"
max_document_tokens = {case.longest}
batch_documents = {case.batch}
workers = 0
[parallel]
{axes}
[plan]
strategy = "{case.strategy}"
[plan.options]
policy = "{case.policy}"
[train]
output_dir = "{directory / "run"}"
steps = {STEPS}
threads_per_process = 1
cost_file = "{directory / "cost.json"}"
"""
    )
    return lengths


def write_costs(directory: Path, case: Case) -> None:
    """Costs from a data sheet as if measured on this model and layout, so that no calibration runs before: its tensors
    are gone when training starts, and what they leave to the allocator is not what is measured here."""
    model = msgspec.structs.replace(
        model_from(str(directory / "model")), bytes_per_element=BYTES_PER_ELEMENT[case.dtype]
    )
    sizes = {axis: case.sizes.get(axis, 1) for axis in ("dp", "cp", "pp", "tp")}
    costs = analytic_coefficients(model, cluster_from("h100x8"), even_layout(case.layers, **sizes))
    on = MeasuredOn(model=model, **sizes)
    costs = msgspec.structs.replace(costs, source="calibrated", measured_on=on, host_link=None)
    write_coefficients(directory / "cost.json", costs)


def append(row: dict) -> None:
    """Append a row, to a new file with its header."""
    LEDGER.parent.mkdir(parents=True, exist_ok=True)
    is_new = not LEDGER.exists()
    with LEDGER.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerow({**row, "error": f"{row['error']:.4f}"})


if __name__ == "__main__":
    main()
