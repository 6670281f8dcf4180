"""Commands of `evenload` whose ranks calibrate in a fraction of the time, and check steps of few tokens: for tests that
ask what a command does, not how true its predictions are.

In a process of tests, whose ranks then come from `rank_server` (`quick_commands`), and as a program of its own
(`python -c "import quick_commands; quick_commands.main()" train config.toml`).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import evenload.cli.main
from evenload.cli import launch
from quick_calibration import quick_calibration

_RUN_LOCAL = launch.run_local


@contextmanager
def quick_commands() -> Iterator[None]:
    """Of commands that are started here."""
    with mock.patch.object(launch, "run_local", _run_quickly):
        yield


def _run_quickly(function: Callable[..., int], arguments: tuple, num_processes: int, **options: float) -> None:
    _RUN_LOCAL(quick_rank, (function, *arguments), num_processes, **options)


def quick_rank(function: Callable[..., int], *arguments) -> int:
    """Ranks import this by name."""
    with quick_calibration(), mock.patch("evenload.check.smaller_run._MAX_TOKENS", 512):
        return function(*arguments)


def main() -> None:
    """The command line."""
    with quick_commands():
        evenload.cli.main.main()
