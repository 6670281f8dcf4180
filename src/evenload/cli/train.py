"""`train_run`: the processes of a training run, for `evenload train` and `evenload.train`."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evenload.cli.environment import prepare_environment
from evenload.cli.options import calibration_cache, require_writable_directory
from evenload.config.sections import require_trackers
from evenload.errors import ConfigError, needs_train_extra, require_train_extra
from evenload.types.text import counted

if TYPE_CHECKING:
    from evenload.config.train_config import TrainConfig
    from evenload.integrations.callback import Callback
    from evenload.types.layout import ParallelLayout


_TORCHRUN = "TORCHELASTIC_RUN_ID"


def train_run(
    settings: "TrainConfig",
    *,
    name: str,
    command: str,
    callbacks: "tuple[Callback, ...]" = (),
    nproc: int | None = None,
    one_in_place: bool = False,
) -> int:
    """Train; gives the number of the signal because of which the run stopped, or 0.

    Under torchrun this process is one rank. Else processes are started here, one a rank.

    Args:
        name: of the configuration, for the first line.
        command: that goes on with this run.
        nproc: processes that the user expects to be started here.
        one_in_place: a run of one process is trained in this one.

    Raises:
        SystemExit: 128 + signal, where processes were started here and a signal stopped them.
    """
    prepare_environment()
    require_trackers(settings.log)
    if os.environ.get("RANK", "0") == "0":
        # Importing torch takes seconds, in which nobody should have to wonder.
        sys.stderr.write(
            f"evenload {version('evenload')} train {name} -> {settings.train.output_dir} | checking settings, then "
            "starting processes (importing PyTorch takes some seconds)\n"
        )
        sys.stderr.flush()
    require_writable_directory(Path(settings.train.output_dir), "train.output_dir")
    if _TORCHRUN in os.environ:
        if nproc is not None:
            raise ConfigError("--nproc is for runs without torchrun; torchrun has started the processes already")
        with needs_train_extra("evenload train"):
            from torch.distributed.elastic.multiprocessing.errors import record

        return record(_run_rank)(settings, calibration_cache(), "the same torchrun command", callbacks) or 0
    from evenload.runtime.checkpoint.directory import checkpoint_to_resume, checkpoints_of

    checkpoint_to_resume(checkpoints_of(settings.train.output_dir), may_resume=settings.train.resume)
    if one_in_place and _product(settings) == 1:
        return _run_here(settings, command, callbacks)
    return _run_in_processes(settings, command, callbacks, nproc)


def _run_in_processes(
    settings: "TrainConfig", command: str, callbacks: "tuple[Callback, ...]", nproc: int | None
) -> int:
    from evenload.cli.launch import call_in_child, run_local, start_fork_server

    # Everything a user can get wrong is checked here, once, before ranks start.
    start_fork_server("evenload.cli.train_worker", "evenload.cli.worker_setup")
    with needs_train_extra("evenload train"):
        import torch.distributed.launcher.api  # noqa: F401  # while the server imports the rest

        layout = call_in_child(_checked_layout, settings)
    if nproc is not None and nproc != layout.world_size:
        raise ConfigError(
            f"--nproc is {nproc}, but layout {layout.describe()} needs {counted(layout.world_size, 'process')}; "
            "change --nproc, or parallel.dp / parallel.pp"
        )
    task = settings, calibration_cache(), command, callbacks
    run_local(_run_rank, task, layout.world_size, grace_s=settings.train.stop_grace_s)
    return 0


def _run_here(settings: "TrainConfig", command: str, callbacks: "tuple[Callback, ...]") -> int:
    with needs_train_extra("evenload train"):
        _checked_layout(settings)
        with _alone():
            return _run_rank(settings, calibration_cache(), command, callbacks)


@contextmanager
def _alone() -> Iterator[None]:
    """The environment that torchrun would give this process as the only one of a job; it is as it was afterwards."""
    import torch.distributed as dist

    if dist.is_initialized():
        raise ConfigError(
            "torch.distributed is initialised in this process already, so it cannot become the one process of a run; "
            "call torch.distributed.destroy_process_group() before, or train in a process of its own: evenload train"
        )
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # type: ignore[reportPrivateImportUsage]
    place = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": str(True),
    }
    before = {name: os.environ.get(name) for name in place}
    os.environ.update(place)
    try:
        yield
    finally:
        if dist.is_initialized():  # after an error
            dist.destroy_process_group()
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _product(settings: "TrainConfig") -> int:
    sizes = settings.parallel
    return sizes.dp * sizes.pp * sizes.cp * sizes.tp


# Named here, so that the launcher itself need not import what its children have imported.


def _checked_layout(settings: "TrainConfig") -> "ParallelLayout":
    from evenload.cli.worker_setup import require_runnable
    from evenload.runtime.device import require_device

    layout = require_runnable(settings)
    require_device(settings.train.device, layout.world_size)
    return layout


def _run_rank(settings: "TrainConfig", cache: Path, command: str, callbacks: "tuple[Callback, ...]") -> int:
    from evenload.cli.train_worker import RunTask, run_worker

    return run_worker(RunTask(config=settings, cache=cache, command=command, callbacks=callbacks))


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

    The smallest CONFIG.toml, here of a folder of text files, read as bytes, and random weights:

        \\[model]
        path = "config.json"  # or a Hugging Face directory, or a name on the Hub
        random_init = true
        \\[data]
        sources = \\["corpus"]
        max_document_tokens = 8192
        batch_documents = 64
        \\[train]
        output_dir = "runs/first"
        steps = 100

    Starts its own processes on this machine, one per rank of \\[parallel]. Under torchrun (one machine or many)
    it is one rank of that job:

        evenload train config.toml parallel.pp=2 train.steps=100

        torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500
            -m evenload.cli.main train config.toml

    SIGTERM, SIGHUP or Ctrl-C: finishes the running step, saves a checkpoint and says how to go on; exit code 128 +
    signal. A second one ends at once.

    Writes metrics.jsonl, report.html, trace.json, plan.json, checkpoints/ and model/ into train.output_dir.
    """
    from evenload.cli.run_lines import resume_command
    from evenload.config.train_config import load_train_config

    require_train_extra("evenload train")
    settings = load_train_config(config, overrides or [])
    command = resume_command(sys.orig_argv, is_resumed=settings.train.resume)
    number = train_run(settings, name=str(config), command=command, nproc=nproc)
    sys.exit(128 + number if number else 0)
