"""Signals that request a rank to stop: the first is recorded, one soon after is the same, a later one ends."""

import os
import signal
import subprocess
import sys

import pytest

from evenload.cli.launch import STOP_SIGNALS, StopRequest
from evenload.cli.train import resume_command


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
