"""`evenload check`: proves on the user's model and data what training promises."""

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evenload.errors import ConfigError
from evenload.types.train_extra import needs_train_extra

if TYPE_CHECKING:
    from evenload.check.scope import Scope
    from evenload.check.verdict import Verdict
    from evenload.runtime.config import TrainConfig
    from evenload.runtime.stop_request import StopLine

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

    with needs_train_extra("evenload check"):
        from evenload.check.scope import checked_scope
        from evenload.check.verdict import Verdict, exit_code
        from evenload.cli.launch import run_local
        from evenload.data.tokenize import open_tokenizer
        from evenload.runtime.config import load_train_config
        from evenload.runtime.device import require_device
        from evenload.runtime.hf_model import load_config
        from evenload.runtime.recipes import position_warning
        from evenload.runtime.run_layout import layout_of
        from evenload.runtime.run_tokenizer import tokenizer_fact
        from evenload.runtime.start_checks import require_runnable
        from evenload.runtime.trainer import model_spec

    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise ConfigError("evenload check starts its own processes on one machine; run it without torchrun")
    started_s = time.perf_counter()
    settings = load_train_config(config, overrides or [])
    require_runnable(settings)
    cache = str(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "evenload" / "calibration")
    with tempfile.TemporaryDirectory(prefix="evenload-check-") as directory:
        scope = checked_scope(settings, Path(directory))
        answer = Path(directory) / "verdicts.json"
        layout = layout_of(scope.config, model_spec(scope.config).num_layers)
        console = Console(stderr=True, highlight=False)
        smaller = f"; smaller than your run: {', '.join(scope.notes)}" if scope.notes else ""
        console.print(f"checking {settings.model.path} on layout {layout.describe()}{smaller}", soft_wrap=True)
        tokenizer = open_tokenizer(settings.data.tokenizer, settings.data.eos_token)
        console.print(
            f"tokenizer {tokenizer_fact(settings.data, tokenizer, model_spec(settings).vocab_size)}", soft_wrap=True
        )
        hf_config = load_config(settings.model.path)
        if warning := position_warning(hf_config, settings.data.max_document_tokens):
            console.print(f"evenload: warning: {warning}", soft_wrap=True)
        require_device(scope.config.train.device, layout.world_size)
        run_local(run_check_worker, (settings, scope, cache, str(answer)), layout.world_size)
        verdicts = msgspec.json.decode(answer.read_bytes(), type=list[Verdict])
    _show(verdicts, time.perf_counter() - started_s)
    sys.exit(exit_code(verdicts))


def run_check_worker(config: "TrainConfig", scope: "Scope", cache_directory: str, answer: str, line: "StopLine") -> int:
    """One rank of the checks; rank 0 leaves the verdicts in a file. They end at once when they are asked to stop."""
    from torch.distributed.elastic.multiprocessing.errors import record

    try:
        record(_run_rank)(config, scope, Path(cache_directory), Path(answer))
    except BaseException:
        line.note_failure()
        raise
    return 0


def _run_rank(config: "TrainConfig", scope: "Scope", cache: Path, answer: Path) -> None:
    import msgspec
    from rich.console import Console

    from evenload.check.run_checks import run_checks
    from evenload.cli.worker_setup import memory_for_rank, run_coefficients, started_rank
    from evenload.runtime.run_layout import layout_of
    from evenload.runtime.trainer import Trainer, model_spec

    layout = layout_of(scope.config, model_spec(scope.config).num_layers)
    users = layout_of(config, model_spec(config).num_layers)
    with started_rank(scope.config, layout) as setup:
        cap_bytes = config.plan.memory_bytes or memory_for_rank(setup.mesh.device, users.world_size)
        console = Console(stderr=True, quiet=setup.mesh.rank != 0, highlight=False)
        trainer = Trainer(scope.config, setup.mesh)
        coefficients = run_coefficients(trainer, cache, setup.threads, console, config.data.max_document_tokens)
        del trainer
        verdicts = run_checks(
            config,
            scope,
            setup.mesh,
            coefficients,
            setup.memory_cap_bytes,
            cap_bytes,
            lambda name: console.print(f"checking {name}"),
        )
        if setup.mesh.rank == 0:
            answer.write_bytes(msgspec.json.encode(verdicts))


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
