"""Commands of `evenload` whose ranks calibrate in a fraction of the time: for tests that ask what a command does, not
how true its predictions are.

In a process of tests, whose ranks then come from `rank_server` (`quick_commands`), and as a program of its own
(`python -c "import quick_commands; quick_commands.main()" train config.toml`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import evenload.cli.main
from evenload.cli import bench, check, train
from quick_calibration import quick_calibration

_TRAIN, _CHECK, _BENCH = train._run_rank, check._run_rank, bench._run_rank


@contextmanager
def quick_commands() -> Iterator[None]:
    """Of commands that are started here."""
    with (
        mock.patch.object(train, "_run_rank", train_rank),
        mock.patch.object(check, "_run_rank", check_rank),
        mock.patch.object(bench, "_run_rank", bench_rank),
    ):
        yield


# Ranks import these by name; there, what they call is the command's own.


def train_rank(*arguments) -> int:
    with quick_calibration():
        return _TRAIN(*arguments)


def check_rank(*arguments) -> int:
    with quick_calibration():
        return _CHECK(*arguments)


def bench_rank(*arguments) -> int:
    with quick_calibration():
        return _BENCH(*arguments)


def main() -> None:
    """The command line."""
    with quick_commands():
        evenload.cli.main.main()
