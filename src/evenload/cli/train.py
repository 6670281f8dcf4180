"""`evenload train`: train a Hugging Face decoder as a TOML file says."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from evenload.cli.output_file import require_writable_directory
from evenload.errors import ConfigError
from evenload.types.train_extra import needs_train_extra


def train_command(
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG.toml", help="Settings of the run; see docs/configuration.md.")
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[section.key=value]...", help="Replace settings, for example train.steps=20."),
    ] = None,
    nproc: Annotated[
        int | None, typer.Option(help="Processes to start here; default: as many as the layout needs.")
    ] = None,
) -> None:
    """Train a Hugging Face decoder on documents of any length.

    Starts its own processes on this machine, one per rank of \\[parallel]. Under torchrun (one machine or many)
    it is one rank of that job:

        evenload train config.toml parallel.pp=2 train.steps=100

        torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500
            -m evenload.cli.main train config.toml

    SIGTERM, SIGHUP or Ctrl-C: finishes the running step, saves a checkpoint and says how to go on; exit code 128 +
    signal. A second one ends at once.

    Writes metrics.jsonl, report.html, trace.json, plan.json, checkpoints/ and model/ into train.output_dir.
    """
    with needs_train_extra("evenload train"):
        from evenload.cli.launch import run_local
        from evenload.cli.resume_command import resume_command
        from evenload.cli.train_worker import run_worker
        from evenload.runtime.checkpoint import checkpoint_to_resume, checkpoints_of
        from evenload.runtime.config import load_train_config
        from evenload.runtime.device import require_device
        from evenload.runtime.start_checks import require_runnable

    settings = load_train_config(config, overrides or [])
    cache = str(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "evenload" / "calibration")
    if "TORCHELASTIC_RUN_ID" in os.environ:
        if nproc is not None:
            raise ConfigError("--nproc is for runs without torchrun; torchrun has started the processes already")
        sys.exit(128 + number if (number := run_worker(settings, cache, "the same torchrun command")) else 0)
    # Everything a user can get wrong is checked here, once, before processes start.
    require_writable_directory(Path(settings.train.output_dir), "train.output_dir")
    checkpoint_to_resume(checkpoints_of(settings.train.output_dir), may_resume=settings.train.resume)
    layout = require_runnable(settings)
    if nproc is not None and nproc != layout.world_size:
        raise ConfigError(
            f"--nproc is {nproc}, but layout {layout.describe()} needs {layout.world_size} processes; "
            "change --nproc, or parallel.dp / parallel.pp"
        )
    require_device(settings.train.device, layout.world_size)
    command = resume_command(sys.orig_argv, is_resumed=settings.train.resume)
    run_local(run_worker, (settings, cache, command), layout.world_size, grace_s=settings.train.stop_grace_s)
