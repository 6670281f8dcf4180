"""An installed wheel, tried without torch and without a compiler: it plans, and says what training needs.

    PYTHON_OF_THE_ENVIRONMENT tools/try_wheel.py        in `make wheel`, and in CI for every platform and Python

Needs nothing but the wheel and what it depends on. Exit code 1 with what is wrong.
"""

import json
import subprocess
import sys
import tempfile
from importlib.metadata import requires, version
from importlib.util import find_spec
from pathlib import Path

LENGTHS = [40, 90, 130, 200, 320, 500, 700, 1100, 1900, 3000, 5200, 9000, 15000, 16384]
PLAN = ("--model", "llama-7b", "--cluster", "h100x8", "--layout", "dp=4,pp=2", "--context", "16384",
        "--documents", "64", "--steps", "1", "--strategy", "best_fit,slimpack,auto")  # fmt: skip


def main() -> None:
    """Every check in order; the first that fails ends it."""
    core = stable_core()
    with tempfile.TemporaryDirectory() as folder:
        commands_agree(Path(folder))
        best, factor = plans(Path(folder))
        needed = training_says_what_it_needs(Path(folder))
        completes(Path(folder))
    sys.stdout.write(
        f"evenload {version('evenload')} under Python {sys.version.split()[0]} on {sys.platform}: {core} loads, "
        f"plans ({best} {factor:.2f} times as fast as best_fit, predicted), {needed}\n"
    )


def stable_core() -> str:
    """The core's file; on an interpreter with a stable ABI its name must say that it is of that."""
    from evenload import _native

    name = Path(str(_native.__file__)).name
    if getattr(sys, "_is_gil_enabled", lambda: True)():
        require(name.endswith(".abi3.so"), f"the core is {name}, which only this version of Python loads")
    return name


def commands_agree(folder: Path) -> None:
    """The script, the module and the attribute name one version."""
    expected = f"evenload {version('evenload')}"
    script = Path(sys.executable).parent / "evenload"
    attribute = [sys.executable, "-c", "import evenload; print('evenload', evenload.__version__)"]
    for command in ([str(script), "--version"], [sys.executable, "-m", "evenload", "--version"], attribute):
        output = call(command, folder).stdout.strip()
        require(output == expected, f"{command} says {output!r}, the distribution is {expected!r}")


def plans(folder: Path) -> tuple[str, float]:
    """A comparison of strategies on a small table: the best one and its factor over best_fit."""
    (folder / "lengths.txt").write_text("\n".join(map(str, LENGTHS * 20)) + "\n")
    call([sys.executable, "-m", "evenload", "plan", "lengths.txt", *PLAN, "--json", "plan.json"], folder)
    result = json.loads((folder / "plan.json").read_text())
    rows = {row["name"]: row for row in result["strategies"]}
    require(set(rows) == {"best_fit", "slimpack", "auto"}, f"strategies planned: {sorted(rows)}")
    return result["best"], rows[result["best"]]["speedup_over_best_fit"]


def training_says_what_it_needs(folder: Path) -> str:
    """Without torch: one line with the command that installs it, and exit code 2."""
    extras = [line for line in requires("evenload") or [] if "extra" in line and "train" in line]
    require(any(line.startswith("torch") for line in extras), f"the wheel has no extra 'train' with torch: {extras}")
    if find_spec("torch") is not None:
        return "torch is installed here"
    done = call([sys.executable, "-m", "evenload", "train", "config.toml"], folder, expected=2)
    require("pip install 'evenload[train]'" in done.stderr, f"evenload train says: {done.stderr}")
    require(len(done.stderr.splitlines()) == 1, f"evenload train says more than a line: {done.stderr}")
    return "says what training needs"


def completes(folder: Path) -> None:
    """Shells complete commands and options."""
    environment = {"_EVENLOAD_COMPLETE": "complete_bash", "COMP_WORDS": "evenload pl", "COMP_CWORD": "1"}
    script = Path(sys.executable).parent / "evenload"
    done = subprocess.run([script], cwd=folder, env=environment, capture_output=True, text=True, check=False)
    require(done.stdout.split() == ["plan"], f"'evenload pl' completes to {done.stdout!r} {done.stderr}")


def call(command: list[str], folder: Path, expected: int = 0) -> "subprocess.CompletedProcess[str]":
    """Run it away from the repository, so that the installed package answers."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    require(
        done.returncode == expected,
        f"{' '.join(command)} ended with {done.returncode}, not {expected}:\n{done.stdout}{done.stderr}",
    )
    return done


def require(holds: bool, otherwise: str) -> None:
    """Stop with what is wrong."""
    if not holds:
        sys.exit(f"tools/try_wheel.py: {otherwise}")


if __name__ == "__main__":
    main()
