"""`evenload.train`: what `evenload train` does, as a function.

Where the processes come from:

    under torchrun                 this process is one rank; call the function in every one
    a run of one process           is trained in this process
    a run of several processes     they are started here, as by the command, and this one waits

Processes that are started import what callbacks are made of, so these have to be importable there: classes of a module,
or of the script itself if its call stands under `if __name__ == "__main__":`; not classes of a notebook's cells.
"""

import multiprocessing
import os
import pickle
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from evenload.cli.train import train_run
from evenload.config.train_config import TrainConfig, load_train_config, read_train_config
from evenload.errors import ConfigError, require_train_extra
from evenload.integrations.callback import Callback
from evenload.report.run_files import latest_per_step, read_metrics
from evenload.runtime.checkpoint.directory import checkpoints_of, latest_checkpoint, steps_in_name


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
        newest = self.checkpoint
        return 0 if newest is None else steps_in_name(newest)

    @property
    def rows(self) -> tuple[Mapping[str, int | float | str | None], ...]:
        """Of metrics.jsonl, one a step (docs/outputs.md says what the keys are)."""
        return tuple(latest_per_step(read_metrics(self.output_dir / "metrics.jsonl")))


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
        callbacks: told of the run, in the process of rank 0.
        overrides: as on the command line: `["train.steps=20"]`; not with a `TrainConfig`.

    Raises:
        ConfigError: settings that cannot work, or callbacks that other processes cannot import. CallbackError: a
            callback raised an exception. Other errors of `evenload.errors`, as the command shows them.
    """
    require_train_extra("evenload.train")
    settings, name = _settings(config, overrides)
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
    sizes = settings.parallel
    is_started_here = "TORCHELASTIC_RUN_ID" not in os.environ
    if is_started_here and sizes.dp * sizes.pp * sizes.cp * sizes.tp > 1:
        _require_importable(callbacks)
    try:
        number = train_run(
            settings,
            name=name,
            command="the same call of evenload.train",
            callbacks=tuple(callbacks),
            one_in_place=True,
        )
    except SystemExit as ended:
        if not isinstance(ended.code, int) or ended.code <= 128:
            raise
        number = ended.code - 128
    stopped_by = signal.Signals(number).name if number else None
    return TrainedRun(output_dir=Path(settings.train.output_dir), stopped_by=stopped_by)


def _settings(
    config: str | os.PathLike[str] | Mapping[str, object] | TrainConfig, overrides: Sequence[str]
) -> tuple[TrainConfig, str]:
    if isinstance(config, TrainConfig):
        if overrides:
            raise ConfigError(f"overrides {list(overrides)} are for files and dicts; change the TrainConfig instead")
        return config, "a TrainConfig"
    if isinstance(config, Mapping):
        return read_train_config(config, overrides), "a dict"
    return load_train_config(Path(config), overrides), os.fspath(config)


def _require_importable(callbacks: Sequence[Callback]) -> None:
    for one in callbacks:
        name = type(one).__qualname__
        advice = "put the class into a module, or train with one process, where callbacks may be anything"
        if type(one).__module__ == "__main__" and not hasattr(sys.modules["__main__"], "__file__"):
            raise ConfigError(
                f"callback {name} is defined in a session or notebook, which processes of the run cannot import; "
                f"{advice}"
            )
        try:
            pickle.dumps(one)
        except Exception as error:  # pickle has no common class
            raise ConfigError(
                f"callback {name} cannot be sent to the process of rank 0 ({type(error).__name__}: {error}); open "
                f"files and the like in on_start, and {advice}"
            ) from error
