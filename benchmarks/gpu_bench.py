"""Strategies against each other and against their predictions on one GPU: `evenload bench` on both models' shapes.

The cases of gpu_training.py, but the same global batches under every strategy, interleaved step by step in one process.
Appends a row a strategy and batch to benchmarks/accuracy/gpu.csv: measured and predicted step, pack times and peak
memory with signed errors, the device named.

    python benchmarks/gpu_bench.py [--quick]

Refuses without a GPU. It has not been run on one yet.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
import torch

from evenload.bench.runs import BenchResult
from gpu_training import (
    QUICK_STEP_TOKENS,
    STEP_TOKENS,
    Case,
    large_config,
    skewed_lengths,
    small_config,
    write_run,
)
from results import commit_name

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))
from ledger import append_result

STRATEGIES = "padded,best_fit,balanced,wlb,slimpack,auto"
LEDGER = Path(__file__).parent / "accuracy" / "gpu.csv"
BATCHES, ROUNDS = 2, 3


def bench(case: Case, device: str = "cuda", ledger: Path = LEDGER) -> int:
    """The exit code of `evenload bench` on a case."""
    with tempfile.TemporaryDirectory() as folder:
        config = write_run(case, Path(folder), BATCHES, device)
        answer = Path(folder) / "result.json"
        sizes = ("--steps", str(BATCHES), "--rounds", str(ROUNDS), "--json", str(answer))
        command = [sys.executable, "-m", "evenload.cli.main", "bench", str(config), "--strategy", STRATEGIES, *sizes]
        if code := subprocess.run(command, check=False).returncode:
            return code
        append_result(ledger, msgspec.json.decode(answer.read_bytes(), type=BenchResult), case.name, commit_name())
        return 0


def main() -> None:
    """Exit code 1 where a case failed; the others have run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="an eighth of the tokens")
    tokens = QUICK_STEP_TOKENS if parser.parse_args().quick else STEP_TOKENS
    if not torch.cuda.is_available():
        sys.exit("benchmarks/gpu_bench.py needs a GPU: torch.cuda.is_available() is false")
    large = large_config(torch.cuda.get_device_properties(0).total_memory)
    lengths = skewed_lengths(tokens * (BATCHES + 1))
    cases = [Case("0.5B", small_config(), lengths, tokens), Case("7B widths", large, lengths, tokens)]
    LEDGER.parent.mkdir(exist_ok=True)
    codes = [bench(case) for case in cases]
    sys.exit(any(codes))


if __name__ == "__main__":
    main()
