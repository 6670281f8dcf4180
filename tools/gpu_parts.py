"""`make gpu`: everything that only a machine with a CUDA GPU can show, in parts that each leave their results.

    python tools/gpu_parts.py [--minutes M] [--out DIR] [PART ...]       all parts in order, or those named

What is cheap and decides most comes first. A part that fails or takes longer than its limit is told and the next one
runs. Every part has at most five minutes, all of them twenty-five; M minutes after the start none runs any more. Parts
know their limit and stop by themselves with what they have measured.

DIR (default: runs/gpu) holds log.txt, rows.csv, to which each row is written when it is measured, summary.json, and
results.tar.gz: these, and the ledger, cost file and metrics of runs from build/gpu. Exit code 1 where a part failed.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gpu_install import ROOT, SITE

KEPT = ROOT / "build" / "gpu"
_SHOWN_LINES = 15
_LEAST_S, _STOPPING_S = 30, 12  # no part begins with less; parts are told so much less than their limit


@dataclass(frozen=True)
class Part:
    """A command of Python with a limit of seconds; {seconds}, {out} and {kept} in its words are filled in."""

    name: str
    limit_s: float
    words: tuple[str, ...]


def gpu_tests(*, training: bool) -> list[str]:
    """Files of tests/gpu: those of whole runs, which are named so, or the others, kernels first."""
    files = sorted((ROOT / "tests" / "gpu").glob("test_*.py"), key=lambda path: ("kernels" not in path.name, path))
    return [str(path.relative_to(ROOT)) for path in files if path.stem.endswith("_training") == training]


# Warnings of CUDA's and Triton's packages are told, and no failure.
_PYTEST = ("-m", "pytest", "-v", "-W", "default", "-p", "no:cacheprovider", "-m", "not slow", "--timeout=120",
           "--continue-on-collection-errors", "-o", "console_output_style=times",
           "--session-timeout={seconds}")  # fmt: skip
_PROFILE = ("-m", "evenload.cli.main", "profile", "--model", "llama3.2-1b", "--device", "cuda", "--minutes", "1")
_MEASURE = ("benchmarks/gpu_training.py", "--seconds", "{seconds}", "--rows", "{out}/rows.csv", "--kept", "{kept}")

PARTS = (
    Part("install", 30, ("tools/gpu_install.py",)),
    Part("smoke", 60, ("tests/gpu/smoke.py",)),
    Part("kernels", 150, (*_PYTEST, *gpu_tests(training=False))),
    Part("training", 180, (*_PYTEST, *gpu_tests(training=True))),
    Part("comparison", 180, (*_MEASURE, "--part", "comparison")),
    Part("profile", 95, (*_PROFILE, "-o", "{kept}/profile.json")),
    Part("peers", 270, (*_MEASURE, "--part", "peers")),
    Part("whole", 150, (*_MEASURE, "--part", "whole")),
    Part("document", 130, (*_MEASURE, "--part", "document")),
    Part("long", 255, (*_MEASURE, "--part", "long")),
)


def run_parts(parts: Sequence[Part], out: Path, found: str, seconds: float = float("inf")) -> dict[str, str]:
    """Run all in order, with summary and archive after each; how they ended: "passed", "stopped after N s", ..."""
    for folder in (out, KEPT):
        folder.mkdir(parents=True, exist_ok=True)
    ended: dict[str, str] = {}
    until_s = time.monotonic() + seconds
    for part in parts:
        started_s = time.monotonic()
        limit_s = min(part.limit_s, until_s - started_s)
        ended[part.name] = _run(part, limit_s, out) if limit_s >= _LEAST_S else "not begun"
        sys.stdout.write(f"{part.name}: {ended[part.name]} ({time.monotonic() - started_s:.0f} s)\n")
        sys.stdout.flush()
        (out / "summary.json").write_text(json.dumps({"machine": found, "parts": ended}, indent=2) + "\n")
        _archive(out)
    return ended


def _run(part: Part, limit_s: float, out: Path) -> str:
    filled = {"seconds": f"{limit_s - _STOPPING_S:.0f}", "out": str(out.absolute()), "kept": str(KEPT)}
    words = [word.format(**filled) for word in part.words]
    paths = [str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # or every process would compile what was installed
    log = out / "log.txt"
    with log.open("a") as file:
        file.write(f"\n=== {part.name}: python {' '.join(words)}\n")
        file.flush()
        begin = file.tell()
        command = [sys.executable, *words]
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=file, start_new_session=True)
        try:
            code = process.wait(limit_s)
            outcome = "passed" if code == 0 else f"failed with exit code {code}"
        except subprocess.TimeoutExpired:
            outcome = f"stopped after {limit_s:.0f} s"
            process.terminate()  # a part ends what it started in groups of their own
            with suppress(subprocess.TimeoutExpired):
                process.wait(5)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    with log.open(errors="replace") as file:
        file.seek(begin)
        sys.stdout.writelines(f"  {line}" for line in file.readlines()[-_SHOWN_LINES:])
    return outcome


def _archive(out: Path) -> None:
    new, name = out / "new.tar.gz", "results.tar.gz"
    with tarfile.open(new, "w:gz") as archive:
        for folder in (out, KEPT):
            for path in sorted(folder.rglob("*")):
                if path.is_file() and path.name not in (new.name, name):
                    archive.add(path, path.relative_to(folder))
    new.replace(out / name)


def machine() -> str:
    """GPU and versions, or why there is none; by a process that ends, because what holds a GPU takes memory of it."""
    command = [sys.executable, ROOT / "tests" / "gpu" / "smoke.py", "device"]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False).stdout.strip()


def main() -> None:
    """Exit code 1 where a part did not succeed, 2 without a GPU or for an unknown part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(part.name for part in PARTS))
    parser.add_argument("--minutes", type=float, default=float("inf"), help="no part runs longer than until then")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu", help="default: runs/gpu")
    request = parser.parse_args()
    if unknown := set(request.parts) - {part.name for part in PARTS}:
        parser.error(f"no part {', '.join(sorted(unknown))}; choose from {', '.join(part.name for part in PARTS)}")
    if not (found := machine()).startswith("device: ok"):
        parser.error(f"needs a GPU that torch can use; {found}")
    parts = [part for part in PARTS if not request.parts or part.name in request.parts]
    sys.exit(any(end != "passed" for end in run_parts(parts, request.out, found, 60 * request.minutes).values()))


if __name__ == "__main__":
    main()
