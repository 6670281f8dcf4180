"""The launcher, its fork server and its ranks, with real processes: signals, and what is left of them at the end."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from process_tree import family_of, has_ended
from sweeps import sweep

PROGRAM = Path(__file__).parent.parent / "support" / "launch_cases.py"


@contextmanager
def _launched(case: str, grace_s: float = 3600, *, listening: int = 2) -> Iterator[subprocess.Popen]:
    """A launcher in a process group of its own, so many of whose children listen."""
    command = [sys.executable, str(PROGRAM), case, str(grace_s)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as launcher:
        assert launcher.stdout is not None
        for _ in range(listening):
            assert "listening" in launcher.stdout.readline()
        try:
            yield launcher
        finally:
            launcher.kill()


@pytest.mark.parametrize("number", sweep([signal.SIGHUP, signal.SIGTERM], 1))
def test_ranks_that_end_in_time_end_the_command_by_the_signals_number(number) -> None:
    """Also where every process gets the signal, as when a terminal is closed: the server outlives the ranks."""
    with _launched("ends") as launcher:
        family = family_of(launcher.pid)
        os.killpg(launcher.pid, number)
        _, errors = launcher.communicate(timeout=300)
    assert launcher.returncode == 128 + number, errors
    assert f"{number.name}: the running step is finished and a checkpoint saved" in errors
    assert "killed" not in errors
    assert len(family) == 4, "resource tracker, server, two ranks"
    _wait_until_all_have_ended(family)


def test_ranks_that_do_not_end_within_the_grace_are_killed() -> None:
    with _launched("hangs", 1) as launcher:
        since_s = time.monotonic()
        os.kill(launcher.pid, signal.SIGTERM)
        _, errors = launcher.communicate(timeout=300)
        took_s = time.monotonic() - since_s
    assert launcher.returncode == 128 + signal.SIGTERM
    assert "no checkpoint within train.stop_grace_s = 1: killed" in errors
    assert took_s >= 0.9


@pytest.mark.parametrize(("case", "children"), [("hangs", 2), ("errand-hangs", 1)])
def test_nothing_stays_behind_when_the_launcher_is_killed(case, children) -> None:
    with _launched(case, listening=children) as launcher:
        family = family_of(launcher.pid)
        assert len(family) == 2 + children, "resource tracker, server, and who works"
        launcher.kill()
        _wait_until_all_have_ended(family)


def test_ranks_begin_as_new_processes_do() -> None:
    with _launched("begins", listening=0) as launcher:
        output, errors = launcher.communicate(timeout=300)
    assert launcher.returncode == 0, errors
    shown = [line.split() for line in output.splitlines()]
    assert [line[:3] for line in shown] == [["True", "False", str(Path.cwd())]] * 2
    assert shown[0][3] != shown[1][3], "the same random numbers in both"


def test_an_errand_whose_process_is_lost_is_told() -> None:
    with _launched("errand-dies", listening=0) as launcher:
        output, errors = launcher.communicate(timeout=300)
    assert launcher.returncode == 0, errors
    assert "the process that checks the settings ended before it had an answer" in output


def _wait_until_all_have_ended(processes: list[int]) -> None:
    deadline_s = time.monotonic() + 60
    while not all(has_ended(pid) for pid in processes):
        assert time.monotonic() < deadline_s, "a process stayed behind"
        time.sleep(0.05)
