"""Every benchmark runs to its end with `--quick`: a renamed key or field does not wait for the next quiet machine.

What it measures then is noise and is not looked at.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from sweeps import thorough

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"

SOON = {"engine_prices", "paper_flexpipe", "paper_skrull", "simulator"}
"""Those that end within seconds; the others take up to five minutes each."""
NOT_ALONE = {"run_all": "all of them", "shaped_link": "runs another one, and may change the network"}


def quick_benchmarks() -> list[str]:
    """Names of the scripts that say in their first lines that they take `--quick`."""
    paths = sorted(BENCHMARKS.glob("*.py"))
    docs = {path.stem: ast.get_docstring(ast.parse(path.read_text())) or "" for path in paths}
    return [name for name, doc in docs.items() if "--quick" in doc]


ALL = quick_benchmarks()


def test_benchmarks_are_found():
    assert {*SOON, *NOT_ALONE} <= set(ALL)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SOON else thorough) for name in ALL if name not in NOT_ALONE]
)
def test_a_benchmark_runs_to_its_end(name, tmp_path):
    before = {path: path.read_bytes() for path in (BENCHMARKS / "results").glob("*.csv")}
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), "--quick"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3_000:]
    assert done.stdout.strip()
    assert {path: path.read_bytes() for path in before} == before, "--quick results are noise and must not be kept"
