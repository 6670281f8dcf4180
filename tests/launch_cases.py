"""Ranks that only listen to their launcher; `python launch_cases.py ends|hangs GRACE_S` launches two of them."""

import sys
import time

from evenload.cli.launch import run_local
from evenload.runtime.stop_request import StopLine, StopRequest


def ends_when_asked(line: StopLine) -> int:
    """As a run that finishes its step and saves at once."""
    request = StopRequest(line)
    with request.listening():
        print("listening", flush=True)
        while not request.signal:
            time.sleep(0.01)
    return request.signal


def never_ends(line: StopLine) -> int:
    """As a run whose step hangs."""
    with StopRequest(line).listening():
        print("listening", flush=True)
        time.sleep(3600)
    return 0


if __name__ == "__main__":
    run_local({"ends": ends_when_asked, "hangs": never_ends}[sys.argv[1]], (), 2, grace_s=float(sys.argv[2]))
