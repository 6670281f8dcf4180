"""Signals to the launcher, with real processes: ranks that end in time, and ranks that do not."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

PROGRAM = Path(__file__).parent.parent / "launch_cases.py"


def _signalled(ranks: str, grace_s: float, number: signal.Signals) -> tuple[int, str, float]:
    """(exit code, standard error, seconds from the signal to the end) of a launcher whose ranks listen."""
    command = [sys.executable, str(PROGRAM), ranks, str(grace_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        for _ in range(2):
            assert "listening" in launcher.stdout.readline()
        since_s = time.monotonic()
        os.kill(launcher.pid, number)
        _, errors = launcher.communicate(timeout=300)
        return launcher.returncode, errors, time.monotonic() - since_s


def test_ranks_that_end_in_time_end_the_command_by_the_signals_number() -> None:
    code, errors, _ = _signalled("ends", 3600, signal.SIGHUP)
    assert code == 128 + signal.SIGHUP
    assert "SIGHUP: the running step is finished and a checkpoint saved" in errors
    assert "killed" not in errors


def test_ranks_that_do_not_end_within_the_grace_are_killed() -> None:
    code, errors, took_s = _signalled("hangs", 1, signal.SIGTERM)
    assert code == 128 + signal.SIGTERM
    assert "no checkpoint within train.stop_grace_s = 1: killed" in errors
    assert took_s >= 0.9
