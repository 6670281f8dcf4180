"""`make gpu` on a machine without a GPU: its parts begin, end in time, stop no other one, and lose no results."""

import csv
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tarfile
import textwrap
import time
from pathlib import Path

import pytest

import gpu_parts
from evenload.attention.reference import ReferenceAttention
from gpu_parts import PARTS, Part, run_parts

ROOT = Path(__file__).resolve().parents[2]
HALF_HOUR_S, MOST_S = 25 * 60, 8 * 60
FOUND = "device: ok (a card)"


@pytest.fixture
def kept(tmp_path, monkeypatch):
    directory = tmp_path / "build" / "gpu"
    monkeypatch.setattr(gpu_parts, "KEPT", directory)
    monkeypatch.setattr(gpu_parts, "_LEAST_S", 1)
    return directory


@pytest.fixture
def smoke():
    spec = importlib.util.spec_from_file_location("smoke", ROOT / "tests" / "gpu" / "smoke.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def code(text: str) -> tuple[str, ...]:
    return ("-c", textwrap.dedent(text))


def test_parts_fit_a_lent_half_hour_and_what_decides_most_comes_first():
    assert all(part.limit_s <= MOST_S for part in PARTS)
    assert sum(part.limit_s for part in PARTS) <= HALF_HOUR_S
    names = [part.name for part in PARTS]
    cheap = ["install", "smoke", "kernels", "training"]
    assert names == [*cheap, "comparison", "profile", "peers", "whole", "document", "long"]
    kernels, training = (part.words for part in PARTS[2:4])
    files = {f"tests/gpu/{path.name}" for path in (ROOT / "tests" / "gpu").glob("test_*.py")}
    assert {word for word in (*kernels, *training) if word.startswith("tests/")} == files
    of_kernels = [word for word in kernels if word.startswith("tests/")]
    assert "kernels" in of_kernels[0]
    assert "tests/gpu/test_gpu_training.py" in training


@pytest.mark.parametrize(("name", "last"), [("smoke", "core"), ("comparison", "--help"), ("profile", "--help")])
def test_the_command_of_a_part_begins(name, last, tmp_path):
    """A file that is not there, an option that is not known, an import that fails: not first on a lent machine."""
    (words,) = (part.words for part in PARTS if part.name == name)
    words = [word.format(seconds="1", out=tmp_path, kept=tmp_path) for word in words]
    done = subprocess.run([sys.executable, *words, last], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_rows_logs_and_archive_hold_what_every_part_did(tmp_path, kept):
    parts = [
        Part(
            "measures",
            20,
            code("import sys; open(r'{out}/rows.csv', 'a').write('1'); open(r'{kept}/costs', 'w'); print('said')"),
        ),
        Part("fails", 20, code("print('so far'); raise SystemExit(3)")),
        Part("hangs", 1, code("import time; print('begun', flush=True); time.sleep(60)")),
        Part("goes on", 20, code("print('at the end, told {seconds} s')")),
    ]
    out = tmp_path / "out"
    ended = run_parts(parts, out, FOUND)
    expected = {
        "measures": "passed",
        "fails": "failed with exit code 3",
        "hangs": "stopped after 1 s",
        "goes on": "passed",
    }
    assert ended == expected
    assert json.loads((out / "summary.json").read_text()) == {"machine": FOUND, "parts": expected}
    log = (out / "log.txt").read_text()
    for text in ("=== measures", "said", "so far", "begun", "at the end, told 8 s"):
        assert text in log
    names = {path.name for path in out.iterdir()}
    assert names == {"rows.csv", "log.txt", "summary.json", "results.tar.gz"}
    with tarfile.open(out / "results.tar.gz") as archive:
        assert set(archive.getnames()) == {"rows.csv", "log.txt", "summary.json", "costs"}
        assert archive.extractfile("rows.csv").read() == b"1"


def test_nothing_of_a_stopped_part_runs_on(tmp_path, kept):
    """What it started in its group is killed; what it started in groups of their own it ends itself."""
    text = f"""
        import signal, subprocess, sys, time
        sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
        children = [subprocess.Popen(sleeper), subprocess.Popen(sleeper, process_group=0)]
        open(r"{tmp_path}/pids", "w").write(" ".join(str(one.pid) for one in children))
        signal.signal(signal.SIGTERM, lambda *_: (children[1].kill(), sys.exit(1)))
        time.sleep(60)
        """
    assert run_parts([Part("hangs", 2, code(text))], tmp_path / "out", FOUND) == {"hangs": "stopped after 2 s"}
    time.sleep(0.2)
    assert not [pid for pid in (tmp_path / "pids").read_text().split() if is_running(pid)]


def is_running(pid: str) -> bool:
    status = Path("/proc", pid, "stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def test_no_part_runs_longer_than_the_command_may(tmp_path, kept):
    parts = [Part("one", 60, code("import time; time.sleep(30)")), Part("two", 60, code("print('begun')"))]
    assert run_parts(parts, tmp_path / "out", FOUND, seconds=2) == {"one": "stopped after 2 s", "two": "not begun"}
    assert "begun" not in (tmp_path / "out" / "log.txt").read_text().replace("=== two", "")


def test_what_is_installed_for_the_parts_comes_first(tmp_path, kept, monkeypatch):
    monkeypatch.setattr(gpu_parts, "SITE", tmp_path)
    monkeypatch.setenv("PYTHONPATH", "others")
    (tmp_path / "carried.py").write_text("print('from the wheels')")
    look = code(
        "import carried, sys; assert sys.path.index(r'"
        + str(tmp_path)
        + "') < 2; import os; print(os.environ['PYTHONPATH'])"
    )
    assert run_parts([Part("looks", 20, look)], tmp_path / "out", FOUND) == {"looks": "passed"}
    log = (tmp_path / "out" / "log.txt").read_text()
    assert "from the wheels" in log
    assert f"{tmp_path}{os.pathsep}others" in log


def test_smoke_goes_on_whatever_a_check_does(smoke, capfd):
    def fails() -> str:
        raise ValueError("two\nlines")

    def dies() -> str:
        os._exit(7)

    def hangs() -> str:
        time.sleep(60)
        return ""

    checks = {"works": lambda: "1.5", "fails": fails, "dies": dies, "hangs": hangs, "at the end": lambda: "2"}
    smoke.outcome_of.__defaults__ = (1.0,)
    assert smoke.main(checks, []) == 1
    assert capfd.readouterr().out.splitlines() == [
        "works: ok (1.5)",
        "fails: failed: ValueError: two lines",
        "dies: failed: its process ended with exit code 7",
        "hangs: failed: took longer than 1 s",
        "at the end: ok (2)",
    ]
    assert smoke.main(checks, ["works"]) == 0


def test_a_machine_without_a_gpu_is_told_so_at_once():
    done = subprocess.run([sys.executable, "tools/gpu_parts.py"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "needs a GPU that torch can use; device: failed: " in done.stderr


def test_smoke_says_of_every_check_that_there_is_no_gpu(smoke):
    """Each check reaches its first call of CUDA, or the package that is not installed here."""
    done = subprocess.run([sys.executable, smoke.__file__], capture_output=True, text=True, check=False)
    lines = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert done.returncode == 1, done.stderr
    assert list(lines) == list(smoke.CHECKS)
    assert lines.pop("core").startswith("ok (_native")
    for name, outcome in lines.items():
        why = outcome.removeprefix("failed: ")
        assert "CUDA" in why or "NVIDIA" in why or why.startswith("ModuleNotFoundError"), f"{name}: {outcome}"


def test_smoke_calls_attention_and_products_as_they_are(smoke, monkeypatch):
    """On the CPU, with `reference` in place of a GPU's kernels: without it a check would fail first where it counts."""
    monkeypatch.setattr(smoke, "DEVICE", "cpu")
    monkeypatch.setattr("evenload.attention.varlen_cuda.VarlenCudaAttention", ReferenceAttention)
    assert smoke.flash_attention() == "relative error 0.0e+00"
    with pytest.raises(AssertionError, match="summed in bf16"):  # as it is on a CPU
        smoke.wide_product()


def test_smoke_touches_cuda_in_no_process_that_it_forks(smoke):
    """A process that was forked after CUDA began cannot use it."""
    text = f"""
        import runpy, torch
        def refuse(*_): raise AssertionError("touches CUDA")
        for name in ("is_available", "device_count", "_lazy_init", "init"):
            setattr(torch.cuda, name, refuse)
        runpy.run_path({smoke.__file__!r})
        """
    subprocess.run([sys.executable, *code(text)], check=True)


def test_warnings_of_packages_on_a_gpu_machine_fail_no_test(tmp_path):
    """When a test file is read, by the options of the part; in a test, however it is started."""
    folder = tmp_path / "tests" / "gpu"
    folder.mkdir(parents=True)
    shutil.copy(ROOT / "tests" / "gpu" / "conftest.py", folder)
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\nfilterwarnings = ['error']\n")
    warn = "warnings.warn_explicit('old', DeprecationWarning, 'compiler.py', 1, module='triton.compiler')"
    (folder / "test_call.py").write_text(f"import warnings\ndef test_it():\n    {warn}\n")
    (folder / "test_import.py").write_text(f"import warnings\n{warn}\ndef test_it(): pass\n")
    (tmp_path / "tests" / "test_other.py").write_text(f"import warnings\ndef test_it():\n    {warn}\n")

    def passed(*words: str) -> bool:
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *words]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, check=False).returncode == 0

    assert passed("tests/gpu/test_call.py")
    assert not passed("tests/test_other.py")
    assert not passed("tests/gpu/test_import.py")
    assert passed("-W", "default", "tests/gpu")
    for part in PARTS:
        if "pytest" in part.words:
            assert part.words[part.words.index("-W") + 1] == "default"


@pytest.fixture
def copied(tmp_path):
    """benchmarks/harness.py in a folder without a repository, which itself lies in one of somebody else."""
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run(["git", *identity, "commit", "--quiet", "--allow-empty", "-m", "other"], cwd=tmp_path, check=True)
    copy = tmp_path / "copy"
    (copy / "benchmarks").mkdir(parents=True)
    shutil.copy(ROOT / "benchmarks" / "harness.py", copy / "benchmarks")
    return copy


def appended_commit(copy: Path) -> str:
    text = """
        from pathlib import Path
        from harness import Row, append_row
        append_row(Path("rows.csv"), Row("gpu", "a case", "rate", 1.5))
        """
    subprocess.run([sys.executable, *code(text)], cwd=copy, env=os.environ | {"PYTHONPATH": "benchmarks"}, check=True)
    with (copy / "rows.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows[-1]["value"] == "1.5"
    return rows[-1]["commit"]


def test_rows_are_kept_where_there_is_no_repository(copied):
    assert appended_commit(copied) == "unknown"
    (copied / "wheels").mkdir()
    (copied / "wheels" / "commit.txt").write_text("0123456789+changes\n")
    assert appended_commit(copied) == "0123456789+changes"


def test_every_row_is_kept_when_it_is_measured(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from harness import Row, print_and_keep

    path = tmp_path / "rows.csv"

    def measured():
        yield Row("gpu", "one case", "first", 1.0)
        assert "first" in path.read_text()
        raise RuntimeError("the machine is gone")

    with pytest.raises(RuntimeError, match="gone"):
        print_and_keep(measured(), path)
    assert len(path.read_text().splitlines()) == 2
