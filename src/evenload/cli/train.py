"""`evenload train`, and `evenload.train` as a function: under torchrun in every process, which is one rank; else the
function trains a run of one process in this one, and other runs start their processes here and wait.

Processes that are started import the classes of callbacks: of a module, or of the script itself if its call stands
under `if __name__ == "__main__":`; not of a notebook's cells.
"""

import multiprocessing
import os
import pickle
import shlex
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from math import prod
from pathlib import Path

from evenload.cli import launch
from evenload.cli.options import ConfigOptions, calibration_cache, command_of, option, require_writable_directory
from evenload.config.sections import require_trackers
from evenload.config.train_config import TrainConfig, load_train_config, read_train_config
from evenload.errors import ConfigError, needs_train_extra, refusing_unknown, require_train_extra
from evenload.integrations.callback import Callback
from evenload.report.run_files import latest_per_step, read_metrics
from evenload.runtime.checkpoint.directory import checkpoint_to_resume, checkpoints_of, latest_checkpoint, steps_in_name
from evenload.types.text import counted

_WORKER = "evenload.cli.train_worker"


@dataclass(frozen=True, kw_only=True)
class TrainedRun:
    """A run as its files have it, after `evenload.train`.

    Args:
        output_dir: of the run; its report.html, metrics.jsonl, checkpoints, model.
        stopped_by: the signal, such as "SIGTERM", because of which it stopped before its end; None = it is finished.
    """

    output_dir: Path
    stopped_by: str | None = None

    @property
    def checkpoint(self) -> Path | None:
        """The newest complete one; None where there is none."""
        return latest_checkpoint(checkpoints_of(str(self.output_dir)))

    @property
    def steps_done(self) -> int:
        """In that checkpoint."""
        return steps_in_name(self.checkpoint) if self.checkpoint else 0

    @property
    def rows(self) -> tuple[Mapping[str, int | float | str | None], ...]:
        """Of metrics.jsonl, one a step (docs/outputs.md says what the keys are)."""
        return tuple(latest_per_step(read_metrics(self.output_dir / "metrics.jsonl")))


@refusing_unknown("evenload.train")
def train(
    config: str | os.PathLike[str] | Mapping[str, object] | TrainConfig,
    *,
    callbacks: Sequence[Callback] = (),
    overrides: Sequence[str] = (),
) -> TrainedRun:
    """Train as a configuration says, or go on with what its output directory holds. Call it on the main thread.

        class Watch(evenload.Callback):
            def on_step(self, report):
                print(report.row["step"], report.row["loss"])

        if __name__ == "__main__":
            evenload.train("config.toml", callbacks=[Watch()])

    Args:
        config: a TOML file; its tables as a dict; or a `TrainConfig`.
        callbacks: called in the process of rank 0.
        overrides: as on the command line: `["train.steps=20"]`; not with a `TrainConfig`.

    Raises:
        ConfigError: settings that cannot work, or callbacks that other processes cannot import. CallbackError: a
            callback raised an exception. Other errors of `evenload.errors`, as the command shows them.
    """
    require_train_extra("evenload.train")
    if isinstance(config, TrainConfig):
        if overrides:
            raise ConfigError(f"overrides {list(overrides)} are for files and dicts; change the TrainConfig instead")
        settings, name = config, "a TrainConfig"
    elif isinstance(config, Mapping):
        settings, name = read_train_config(config, overrides), "a dict"
    else:
        settings, name = load_train_config(Path(config), overrides), os.fspath(config)
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ConfigError(
            "evenload.train has started a process, which imports this script and so calls evenload.train again; put "
            'the call under: if __name__ == "__main__":'
        )
    for one in callbacks:
        if not isinstance(one, Callback):
            raise ConfigError(
                f"callback {one!r} is no evenload.Callback; derive its class from that, and give an object"
            )
        if not launch.under_torchrun() and _num_ranks(settings) > 1:
            _require_importable(one)
    command = "the same call of evenload.train"
    try:
        number = train_run(settings, name=name, command=command, callbacks=tuple(callbacks), one_in_place=True)
    except SystemExit as ended:
        if not isinstance(ended.code, int) or ended.code <= 128:
            raise
        number = ended.code - 128
    stopped_by = signal.Signals(number).name if number else None
    return TrainedRun(output_dir=Path(settings.train.output_dir), stopped_by=stopped_by)


def _num_ranks(settings: TrainConfig) -> int:
    return prod(getattr(settings.parallel, axis) for axis in ("dp", "pp", "cp", "tp"))


def _require_importable(callback: Callback) -> None:
    kind = type(callback)
    advice = "put the class into a module, or train with one process, where callbacks may be anything"
    if kind.__module__ == "__main__" and not hasattr(sys.modules["__main__"], "__file__"):
        raise ConfigError(
            f"callback {kind.__qualname__} is defined in a session or notebook, which processes of the run cannot "
            f"import; {advice}"
        )
    try:
        pickle.dumps(callback)
    except Exception as error:  # pickle has no common class
        raise ConfigError(
            f"callback {kind.__qualname__} cannot be sent to the process of rank 0 ({type(error).__name__}: {error}); "
            f"open files and the like in on_start, and {advice}"
        ) from error


def train_run(
    settings: TrainConfig,
    *,
    name: str,
    command: str,
    callbacks: tuple[Callback, ...] = (),
    nproc: int | None = None,
    one_in_place: bool = False,
) -> int:
    """Train; returns the number of the signal because of which the run stopped, or 0; raises `SystemExit` (128 +
    signal) where it stopped processes that were started here.

    Args:
        name: of the configuration, for the first line; `command` goes on with this run.
        nproc: processes that the user expects to be started here.
        one_in_place: a run of one process is trained in this one.
    """
    launch.prepare_environment()
    require_trackers(settings.log)
    if os.environ.get("RANK", "0") == "0":
        sys.stderr.write(
            f"evenload {version('evenload')} train {name} -> {settings.train.output_dir} | checking settings, then "
            "starting processes (importing PyTorch takes some seconds)\n"
        )
        sys.stderr.flush()
    require_writable_directory(Path(settings.train.output_dir), "train.output_dir")
    if launch.under_torchrun():
        if nproc is not None:
            raise ConfigError("--nproc is for runs without torchrun; torchrun has started the processes already")
        command = "the same torchrun command"
    else:
        checkpoint_to_resume(checkpoints_of(settings.train.output_dir), may_resume=settings.train.resume)
    rank = f"{_WORKER}:run_worker", settings, calibration_cache(), command, callbacks
    if launch.under_torchrun():
        with needs_train_extra("evenload train"):
            from torch.distributed.elastic.multiprocessing.errors import record

        return record(launch.call)(*rank) or 0
    if one_in_place and _num_ranks(settings) == 1:
        with needs_train_extra("evenload train"):
            launch.call(f"{_WORKER}:start_layout", settings)
            with _only_rank():
                return launch.call(*rank)
    # Everything a user can get wrong is checked here, once, before ranks start.
    with needs_train_extra("evenload train"):
        layout = launch.checked_in_child(f"{_WORKER}:start_layout", settings)
    if nproc is not None and nproc != layout.world_size:
        raise ConfigError(
            f"--nproc is {nproc}, but layout {layout.describe()} needs {counted(layout.world_size, 'process')}; "
            "change --nproc, or parallel.dp / parallel.pp"
        )
    launch.run_local(launch.call, rank, layout.world_size, grace_s=settings.train.stop_grace_s)
    return 0


@contextmanager
def _only_rank() -> Iterator[None]:
    """Set the environment that torchrun would give this process as the only one of a job, and restore it."""
    import torch.distributed as dist

    if dist.is_initialized():
        raise ConfigError(
            "torch.distributed is initialised in this process already, so it cannot become the one process of a run; "
            "call torch.distributed.destroy_process_group() before, or train in a process of its own: evenload train"
        )
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # type: ignore[reportPrivateImportUsage]
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    place |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    before = {name: os.environ[name] for name in place if name in os.environ}
    os.environ.update(place)
    try:
        yield
    finally:
        if dist.is_initialized():  # after an error
            dist.destroy_process_group()
        for name in place:
            del os.environ[name]
        os.environ.update(before)


def resume_command(arguments: Sequence[str], *, is_resumed: bool) -> str:
    """Return the command of `sys.orig_argv` once more, with `train.resume` turned on where it is off."""
    # The interpreter in front of an installed script is not what anybody types.
    script = next((at for at, word in enumerate(arguments[:3]) if Path(word).name == "evenload"), 0)
    return shlex.join([*arguments[script:], *(() if is_resumed else ("train.resume=true",))])


@dataclass(frozen=True, kw_only=True)
class TrainRequest(ConfigOptions):
    """What `evenload train` is to do."""

    nproc: int | None = option(None, "Processes to start here; default: as many as the layout needs.")


def run_train(request: TrainRequest) -> None:
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
    require_train_extra("evenload train")
    settings = request.load()
    command = resume_command(sys.orig_argv, is_resumed=settings.train.resume)
    number = train_run(settings, name=str(request.config), command=command, nproc=request.nproc)
    sys.exit(128 + number if number else 0)


train_command = command_of(TrainRequest, run_train)
