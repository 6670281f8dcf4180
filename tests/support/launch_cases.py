"""Ranks that only listen to their launcher; `python launch_cases.py CASE GRACE_S` launches two of them."""

import os
import random
import signal
import sys
import time

from evenload.cli.launch import STOP_SIGNALS, StopRequest, call_in_child, run_local, start_fork_server
from evenload.errors import EvenloadError


def tell(text: str) -> None:
    """In one write, so that lines of several processes do not mix where output is not buffered."""
    os.write(1, f"{text}\n".encode())


def ends_when_asked() -> int:
    """As a run that finishes its step and saves at once; shows what a process that was forked could have of the one
    before it."""
    handlers = [signal.getsignal(number) for number in STOP_SIGNALS]
    expected = [signal.default_int_handler if n == signal.SIGINT else signal.SIG_DFL for n in STOP_SIGNALS]
    began = f"{handlers == expected} {'' in sys.path} {os.getcwd()} {random.random()}"
    request = StopRequest()
    with request.listening():
        tell(f"listening {began}")
        while not request.signal:
            time.sleep(0.01)
    return request.signal


def never_ends() -> int:
    """As a run whose step hangs."""
    with StopRequest().listening():
        tell("listening")
        time.sleep(3600)
    return 0


def errand(how: str) -> None:
    """What is asked of a process before ranks start."""
    if how == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    tell("listening")
    time.sleep(3600)


def main(case: str, grace_s: float) -> None:
    """Launch two ranks, or for `errands` one that dies, and one that hangs."""
    if case == "errands":
        start_fork_server()
        try:
            call_in_child(errand, "dies")
        except EvenloadError as error:
            tell(str(error))
        call_in_child(errand, "hangs")
        return
    run_local({"ends": ends_when_asked, "hangs": never_ends}[case], (), 2, grace_s=grace_s)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
