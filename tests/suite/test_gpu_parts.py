"""`make gpu` on a machine without a GPU: its parts are commands, and a bad one does not stop the others."""

import json
import runpy
import sys
import time
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "gpu_parts.py"


@pytest.fixture(scope="module")
def tool():
    return runpy.run_path(str(TOOL))


def python(tool, name: str, code: str, limit_s: float = 60.0):
    return tool["Part"](name, limit_s, (sys.executable, "-c", code))


def test_every_part_runs_and_leaves_its_log_whatever_the_others_do(tool, tmp_path, capsys):
    child = (
        "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)'])\n"
    )
    parts = [
        python(tool, "good", "print('measured')"),
        python(tool, "bad", "import sys; print('why', file=sys.stderr); sys.exit(3)"),
        python(tool, "long", f"{child}open(r'{tmp_path}/pid', 'w').write(str(p.pid)); time.sleep(600)", limit_s=3.0),
        python(tool, "last", "print('still measured')"),
    ]
    outcomes = tool["run_parts"](parts, tmp_path / "out")
    assert [one.outcome for one in outcomes] == ["passed", "failed with exit code 3", "stopped after 3 s", "passed"]
    logs = {name: (tmp_path / "out" / f"{name}.log").read_text() for name in ("good", "bad", "last")}
    assert logs == {"good": "measured\n", "bad": "why\n", "last": "still measured\n"}
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert [part["outcome"] for part in summary["parts"]] == [one.outcome for one in outcomes]
    assert "bad: failed with exit code 3" in capsys.readouterr().out
    pid, deadline_s = int((tmp_path / "pid").read_text()), time.monotonic() + 60
    while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]:
        assert time.monotonic() < deadline_s, "what a part started ends with it"
        time.sleep(0.05)


def test_parts_fit_their_limits_and_name_files_that_exist(tool):
    assert all(part.limit_s <= 9 * 60 for part in tool["PARTS"])
    assert sum(part.limit_s for part in tool["PARTS"]) <= 25 * 60
    for part in tool["PARTS"]:
        command = part.command[: part.command.index("-o")] if "-o" in part.command else part.command
        files = [word for word in command if word.startswith(("tests/", "tools/", "benchmarks/"))]
        assert files or "evenload.cli.main" in command
        assert all((TOOL.parent.parent / word).exists() for word in files)
