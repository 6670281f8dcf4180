"""Every case has the same id in every process: parallel workers stop where they collect different ones."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def collected_elsewhere(hash_seed: str) -> set[str]:
    """What a fresh process collects."""
    collecting = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"],
        cwd=ROOT,
        env={key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
        | {"PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=False,
    )
    assert collecting.returncode == 0, collecting.stdout + collecting.stderr
    return {line for line in collecting.stdout.splitlines() if "::" in line}


@pytest.mark.long
def test_every_case_has_the_same_id_in_every_process(request: pytest.FixtureRequest):
    """Here and in a process that starts later, with another seed of hashes; alone, this test collects twice itself."""
    here = {item.nodeid for item in request.session.items}
    if len({name.partition("::")[0] for name in here}) < 50:  # only some files were asked for
        here = collected_elsewhere("1")
        time.sleep(1.1)  # a time of day in an id has changed by then, to the second
    there = collected_elsewhere("2")
    assert len(there) > 1000
    assert here <= there, f"ids that change from one process to the next: {sorted(here - there)[:5]}"
