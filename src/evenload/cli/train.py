"""`evenload train`: train a Hugging Face decoder as a TOML file says."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evenload.cli.output_file import calibration_cache, require_writable_directory
from evenload.errors import ConfigError
from evenload.types.train_extra import needs_train_extra, require_train_extra

if TYPE_CHECKING:
    from evenload.cli.stop_request import StopLine
    from evenload.runtime.config.train_config import TrainConfig
    from evenload.types.layout import ParallelLayout


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
    from evenload.cli.child_process import call_in_child, start_fork_server
    from evenload.cli.launch import run_local
    from evenload.cli.launch_survivors import run_surviving
    from evenload.cli.run_lines import resume_command
    from evenload.runtime.checkpoint.directory import checkpoint_to_resume, checkpoints_of
    from evenload.runtime.config.train_config import load_train_config

    require_train_extra("evenload train")
    settings = load_train_config(config, overrides or [])
    cache = calibration_cache()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        if nproc is not None:
            raise ConfigError("--nproc is for runs without torchrun; torchrun has started the processes already")
        with needs_train_extra("evenload train"):
            from torch.distributed.elastic.multiprocessing.errors import record

            run = _run_elastic_rank if settings.train.on_lost_rank == "shrink" else _run_rank
            number = record(run)(settings, cache, "the same torchrun command")
        sys.exit(128 + number if number else 0)
    # Everything a user can get wrong is checked here, once, before ranks start.
    _require_survivable(settings)
    require_writable_directory(Path(settings.train.output_dir), "train.output_dir")
    checkpoint_to_resume(checkpoints_of(settings.train.output_dir), may_resume=settings.train.resume)
    if settings.train.on_lost_rank == "shrink":
        # Connections to the lost are cut, of which torch would print a page each.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    start_fork_server("evenload.cli.train_worker", "evenload.cli.start_checks")
    with needs_train_extra("evenload train"):
        import torch.distributed.launcher.api  # noqa: F401  # while the server imports the rest

        layout = call_in_child(_checked_layout, settings)
    if nproc is not None and nproc != layout.world_size:
        raise ConfigError(
            f"--nproc is {nproc}, but layout {layout.describe()} needs {layout.world_size} processes; "
            "change --nproc, or parallel.dp / parallel.pp"
        )
    command = resume_command(sys.orig_argv, is_resumed=settings.train.resume)
    task, grace_s = (settings, cache, command), settings.train.stop_grace_s
    if settings.train.on_lost_rank == "shrink":
        run_surviving(
            _run_rank,
            task,
            layout.world_size,
            grace_s=grace_s,
            num_replacements=settings.train.replace_lost_ranks,
            keeps_state=settings.train.survivor_memory == "shared",
        )
    else:
        run_local(_run_rank, task, layout.world_size, grace_s=grace_s)


def _require_survivable(settings: "TrainConfig") -> None:
    """Refuse what cannot go on in the same processes; under torchrun these are new ones."""
    if settings.train.on_lost_rank == "shrink" and settings.train.device != "cpu":
        raise ConfigError(
            f"train.on_lost_rank is 'shrink' and train.device '{settings.train.device}': groups of GPUs are not "
            "rebuilt in a running process in this version; start with torchrun, whose agents start processes again, or "
            "leave on_lost_rank at 'stop'"
        )


# Named here, so that the launcher itself need not import what its children have imported.


def _checked_layout(settings: "TrainConfig") -> "ParallelLayout":
    from evenload.cli.start_checks import require_runnable
    from evenload.runtime.device import require_device

    layout = require_runnable(settings)
    require_device(settings.train.device, layout.world_size)
    return layout


def _run_rank(settings: "TrainConfig", cache: Path, command: str, line: "StopLine | None" = None) -> int | None:
    from evenload.cli.train_worker import run_worker

    return run_worker(settings, cache, command, line)


def _run_elastic_rank(settings: "TrainConfig", cache: Path, command: str) -> int:
    from evenload.cli.elastic_worker import run_elastic_worker

    return run_elastic_worker(settings, cache, command)
