"""`evenload check`: proves on the user's model and data what training promises."""

import sys
import time
from typing import TYPE_CHECKING

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from evenload.cli import launch
from evenload.cli.options import ConfigOptions, calibration_cache, command_of
from evenload.errors import require_train_extra

if TYPE_CHECKING:
    from evenload.check.smaller_run import Verdict

_STYLES = {"pass": "bold green", "fail": "bold red", "skipped": "yellow"}


def run_check(request: ConfigOptions) -> None:
    """Prove on your model and data: isolation, invariance, resume, ledger, memory.

    Takes a minute. Starts the processes of \\[parallel] on this machine, runs a few small steps of the model (its first
    layers where it is large) on the first documents, reads and plans batches as training would, and writes nothing.

    Exit code: 0 all passed or skipped, 1 a check failed, 3 only memory failed, 2 wrong input.
    """
    require_train_extra("evenload check")
    launch.require_own_launch("evenload check")
    started_s = time.perf_counter()
    content = launch.measure("evenload check", "check", request.load(), calibration_cache())
    from evenload.check.smaller_run import Verdict, exit_code

    verdicts = msgspec.json.decode(content, type=list[Verdict])
    _show(verdicts, time.perf_counter() - started_s)
    sys.exit(exit_code(verdicts))


check_command = command_of(ConfigOptions, run_check)


def _show(verdicts: list["Verdict"], seconds: float) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for heading in ("check", "verdict", "what was found"):
        table.add_column(heading, no_wrap=heading != "what was found")
    for verdict in verdicts:
        text = Text(verdict.found)
        if verdict.why:
            text.append("\n" if verdict.found else "")
            text.append(verdict.why, style=_STYLES[verdict.outcome])
        table.add_row(verdict.name, Text(verdict.outcome, style=_STYLES[verdict.outcome]), text)
    console = Console(highlight=False)
    console.print(table)
    failed = [verdict.name for verdict in verdicts if verdict.outcome == "fail"]
    console.print(f"{'failed: ' + ', '.join(failed) if failed else 'nothing failed'} ({seconds:.0f} s)")
