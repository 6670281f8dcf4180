"""The launcher, its fork server and its ranks, with real processes: stop signals, and what is left at the end."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from evenload.cli.launch import STOP_SIGNALS, StopRequest
from evenload.cli.train import resume_command
from process_tree import family_of, has_ended
from sweeps import sweep

PROGRAM = Path(__file__).parent.parent / "support" / "launch_cases.py"


@contextmanager
def _launched(case: str, grace_s: float = 3600, *, lines: int = 2) -> Iterator[tuple[subprocess.Popen, list[str]]]:
    """A launcher in a process group of its own, and so many lines, after which all of its children listen."""
    command = [sys.executable, str(PROGRAM), case, str(grace_s)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as launcher:
        assert launcher.stdout is not None
        output = [launcher.stdout.readline() for _ in range(lines)]
        try:
            yield launcher, output
        finally:
            launcher.kill()


@pytest.mark.parametrize("number", sweep([signal.SIGHUP, signal.SIGTERM], 1))
def test_ranks_that_end_in_time_end_the_command_by_the_signals_number(number) -> None:
    """Also where every process gets the signal, as when a terminal is closed: the server outlives the ranks. They began
    as new processes do."""
    with _launched("ends") as (launcher, output):
        shown = [line.split() for line in output]
        assert [line[:4] for line in shown] == [["listening", "True", "False", str(Path.cwd())]] * 2
        assert shown[0][4] != shown[1][4], "the same random numbers in both"
        family = family_of(launcher.pid)
        os.killpg(launcher.pid, number)
        _, errors = launcher.communicate(timeout=300)
    assert launcher.returncode == 128 + number, errors
    assert f"{number.name}: the running step is finished and a checkpoint saved" in errors
    assert "killed" not in errors
    assert len(family) == 4, "resource tracker, server, two ranks"
    _wait_until_all_have_ended(family)


def test_ranks_that_do_not_end_within_the_grace_are_killed() -> None:
    with _launched("hangs", 1) as (launcher, _):
        since_s = time.monotonic()
        os.kill(launcher.pid, signal.SIGTERM)
        _, errors = launcher.communicate(timeout=300)
        took_s = time.monotonic() - since_s
    assert launcher.returncode == 128 + signal.SIGTERM
    assert "no checkpoint within train.stop_grace_s = 1: killed" in errors
    assert took_s >= 0.9


@pytest.mark.parametrize(("case", "children"), [("hangs", 2), ("errands", 1)])
def test_nothing_stays_behind_when_the_launcher_is_killed(case, children) -> None:
    """Neither ranks nor an errand, before which another one was lost, and that was told."""
    with _launched(case) as (launcher, output):
        assert output[-1] == "listening\n"
        if case == "errands":
            assert "the process that checks the settings ended before it had an answer" in output[0]
        family = family_of(launcher.pid)
        assert len(family) == 2 + children, "resource tracker, server, and who works"
        launcher.kill()
        _wait_until_all_have_ended(family)


def _wait_until_all_have_ended(processes: list[int]) -> None:
    deadline_s = time.monotonic() + 60
    while not all(has_ended(pid) for pid in processes):
        assert time.monotonic() < deadline_s, "a process stayed behind"
        time.sleep(0.05)


@pytest.mark.parametrize("number", STOP_SIGNALS, ids=lambda number: number.name)
def test_a_signal_is_noted_and_nothing_else(number) -> None:
    before = signal.getsignal(number)
    request = StopRequest()
    with request.listening():
        assert request.signal == 0
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)  # at once: the same request, sent twice
        assert request.signal == number
    assert signal.getsignal(number) == before


def test_a_second_signal_ends_the_process_at_once() -> None:
    program = (
        "import os, signal, time\n"
        "from evenload.cli.launch import SAME_REQUEST_S, StopRequest\n"
        "with StopRequest().listening():\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    time.sleep(SAME_REQUEST_S)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    print('still here')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("typed", "is_resumed", "expected"),
    [
        (["python", "bin/evenload", "train", "a b.toml"], True, "bin/evenload train 'a b.toml'"),
        (["python", "-m", "evenload.cli.main", "train", "c.toml"], True, "python -m evenload.cli.main train c.toml"),
        (["python", "evenload", "train", "c.toml", "train.resume=false"], False,
         "evenload train c.toml train.resume=false train.resume=true"),
    ],
    ids=["script", "module", "resume off"],
)  # fmt: skip
def test_the_command_that_goes_on_is_the_one_that_was_typed(typed, is_resumed, expected) -> None:
    assert resume_command(typed, is_resumed=is_resumed) == expected
