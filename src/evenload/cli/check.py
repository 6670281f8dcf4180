"""`evenload check`: proves on the user's model and data what training promises."""

import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evenload.cli.options import calibration_cache
from evenload.errors import needs_train_extra, require_train_extra

if TYPE_CHECKING:
    from evenload.check.runner import Scope, Verdict
    from evenload.config.train_config import TrainConfig
    from evenload.types.layout import ParallelLayout

_STYLES = {"pass": "bold green", "fail": "bold red", "skipped": "yellow"}


def check_command(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.toml", help="Settings of a run of `evenload train`.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[section.key=value]...", help="Replace settings, for example parallel.pp=2."),
    ] = None,
) -> None:
    """Prove on your model and data: isolation, invariance, resume, ledger, memory.

    Takes a minute. Starts the processes of \\[parallel] on this machine, runs a few small steps of the model (its first
    layers where it is large) on the first documents, reads and plans batches as training would, and writes nothing.

    Exit code: 0 all passed or skipped, 1 a check failed, 3 only memory failed, 2 wrong input.
    """
    import msgspec
    from rich.console import Console

    from evenload.cli.launch import call_in_child, require_own_launch, run_local, start_fork_server
    from evenload.config.train_config import load_train_config

    require_train_extra("evenload check")
    require_own_launch("evenload check")
    started_s = time.perf_counter()
    settings = load_train_config(config, overrides or [])
    start_fork_server("evenload.cli.check_worker")
    with tempfile.TemporaryDirectory(prefix="evenload-check-") as directory:
        with needs_train_extra("evenload check"):
            import torch.distributed.launcher.api  # noqa: F401  # while the server imports the rest

            from evenload.check.runner import Verdict, exit_code

            scope, layout, lines = call_in_child(_prepared, settings, Path(directory))
        console = Console(stderr=True, highlight=False)
        for line in lines:
            console.print(line, soft_wrap=True)
        answer = Path(directory) / "verdicts.json"
        run_local(_run_rank, (settings, scope, calibration_cache(), answer), layout.world_size)
        verdicts = msgspec.json.decode(answer.read_bytes(), type=list[Verdict])
    _show(verdicts, time.perf_counter() - started_s)
    sys.exit(exit_code(verdicts))


# Named here, so that the launcher itself need not import what its children have imported.


def _prepared(config: "TrainConfig", directory: Path) -> "tuple[Scope, ParallelLayout, tuple[str, ...]]":
    from evenload.cli.check_worker import prepared_check

    return prepared_check(config, directory)


def _run_rank(config: "TrainConfig", scope: "Scope", cache: Path, answer: Path) -> int:
    from evenload.cli.check_worker import run_check_worker

    return run_check_worker(config, scope, cache, answer)


def _show(verdicts: list["Verdict"], seconds: float) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

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
