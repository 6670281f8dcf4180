"""`make gpu`: everything that only a machine with a CUDA GPU can show, in parts that each leave their results.

    python tools/gpu_parts.py [--out DIR] [PART ...]       all parts in order, or those named

A part that fails or takes longer than its limit is told and the next one runs; a machine that is lent for minutes is
not wasted on the first mistake. Every part has at most nine minutes, all of them twenty-five. What a part printed lies
in DIR/PART.log, how all ended in DIR/summary.json; rows of measurements go to benchmarks/results and
benchmarks/accuracy, with the hardware named. Exit code 1 where a part did not succeed.
"""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_PYTHON = sys.executable


@dataclass(frozen=True)
class Part:
    """A command with a limit of seconds."""

    name: str
    limit_s: float
    command: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """How a part ended: "passed", "failed with exit code N" or "stopped after N s"."""

    part: str
    outcome: str
    seconds: float


_PROFILE = ("-m", "evenload.cli.main", "profile", "--model", "llama3.2-1b", "--device", "cuda", "--minutes", "1.5")

PARTS = (
    Part("install", 120, (_PYTHON, "tools/gpu_install.py")),
    Part("tests", 300, (_PYTHON, "-m", "pytest", "tests/gpu", "-q", "--durations=0")),
    Part("quick", 150, (_PYTHON, "benchmarks/gpu_training.py", "--quick", "--part", "training")),
    Part("training", 480, (_PYTHON, "benchmarks/gpu_training.py", "--append", "--part", "training")),
    Part("bench", 300, (_PYTHON, "benchmarks/gpu_training.py", "--part", "bench")),
    Part("profile", 150, (_PYTHON, *_PROFILE, "-o", "benchmarks/results/gpu_profile.json")),
)
"""The tests come first, then a small run of the measurements: what breaks, breaks early."""


def run_parts(parts: Sequence[Part], out: Path) -> list[Outcome]:
    """Run all, one after the other; the summary is written after each, so that a lost machine leaves what was done."""
    out.mkdir(parents=True, exist_ok=True)
    outcomes: list[Outcome] = []
    for part in parts:
        started_s = time.monotonic()
        outcome = _run(part, out / f"{part.name}.log")
        outcomes.append(Outcome(part.name, outcome, round(time.monotonic() - started_s, 1)))
        sys.stdout.write(f"{part.name}: {outcome} ({outcomes[-1].seconds:.0f} s), {out / part.name}.log\n")
        sys.stdout.flush()
        summary = {"machine": machine(), "parts": [asdict(one) for one in outcomes]}
        (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    return outcomes


def _run(part: Part, log: Path) -> str:
    with log.open("w") as file:
        # A group of its own: ranks and workers of a part that takes too long end with it.
        process = subprocess.Popen(part.command, cwd=ROOT, stdout=file, stderr=file, start_new_session=True)
        try:
            code = process.wait(part.limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f"stopped after {part.limit_s:.0f} s"
    return "passed" if code == 0 else f"failed with exit code {code}"


def machine() -> dict[str, str]:
    """Hardware and versions."""
    import torch

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "gpus": ", ".join(gpus) or "none",
        "cores": str(os.cpu_count()),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def main() -> None:
    """Exit code 1 where a part did not succeed, 2 without a GPU or for an unknown part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(part.name for part in PARTS))
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu", help="default: runs/gpu")
    request = parser.parse_args()
    if unknown := set(request.parts) - {part.name for part in PARTS}:
        parser.error(f"no part {', '.join(sorted(unknown))}; choose from {', '.join(part.name for part in PARTS)}")
    if machine()["gpus"] == "none":
        parser.error("torch finds no GPU here (torch.cuda.is_available() is false)")
    outcomes = run_parts([part for part in PARTS if not request.parts or part.name in request.parts], request.out)
    sys.exit(any(one.outcome != "passed" for one in outcomes))


if __name__ == "__main__":
    main()
