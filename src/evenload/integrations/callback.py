"""`Callback`: a user's own code during a training run; `TensorBoardLog` and `WandbLog` are two of them.

Callbacks run in the process of rank 0, between two steps, while all others wait; an exception stops the run.
"""

import math
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from evenload.config.train_config import TrainConfig
from evenload.types.model import ModelSpec
from evenload.types.run import Validation

if TYPE_CHECKING:  # needs torch, and naming a callback does not
    from evenload.runtime.step_metrics import StepReport

EndReason = Literal["finished", "stopped", "failed"]


@dataclass(frozen=True, eq=False, kw_only=True)
class RunStart:
    """Describes a start of a run; `layout` is that in which it begins ("dp=2 pp=2"), `config` is resolved."""

    config: TrainConfig
    model: ModelSpec
    layout: str
    num_ranks: int
    steps_done: int

    @property
    def output_dir(self) -> Path:
        """Return the directory of the run's files."""
        return Path(self.config.train.output_dir)


@dataclass(frozen=True, kw_only=True)
class RunEnd:
    """Describes how this start of a run ended, after `steps_done` steps in all: "finished" all, "stopped" by a signal
    with a checkpoint, or "failed" with an error."""

    steps_done: int
    reason: EndReason


class Callback:
    """Does nothing; override the calls that you need. One object gets `on_start`, then all else, then `on_end`."""

    def on_start(self, run: RunStart) -> None:
        """Run when training begins, or goes on."""

    def on_step(self, report: "StepReport") -> None:
        """Run after a step; `report` has its row of metrics.jsonl, its plan and all ranks' timeline (`measured`)."""

    def on_validation(self, validation: Validation) -> None:
        """Run after the validation of a step, after its `on_step`; `validation.metrics()` has the losses by name."""

    def on_checkpoint(self, path: Path) -> None:
        """Run when a checkpoint is complete; one that is written during training, after the step that completes it."""

    def on_end(self, end: RunEnd) -> None:
        """Run when training ends here, for whatever reason; once for every `on_start`."""


STEP = "train/global_step"
"""The axis of all other metrics."""
_NAMES = {
    **{key: f"train/{key}" for key in ("loss", "grad_norm", "total_tokens", "total_label_tokens", "tokens")},
    **{key: f"train/{key}" for key in ("documents", "deferred_documents")},
    **{key: f"perf/{key}" for key in ("tokens_per_s", "mfu", "mfu_of_data_sheet", "bubble_fraction")},
    **{key: f"perf/{key}" for key in ("imbalance_forward", "imbalance_backward", "imbalance_dp", "pack_efficiency")},
    **{f"{key}_s": f"time/{key}_s" for key in ("data_wait", "reduction", "gather", "elapsed")},
    "lr": "train/learning_rate",
    "step_time_s": "time/step_s",
    "predicted_step_time_s": "time/predicted_step_s",
    "plan_time_s": "time/plan_s",
    "peak_memory_bytes": "memory/peak_bytes",
    "predicted_peak_memory_bytes": "memory/predicted_peak_bytes",
}
"""Keys of `metrics.jsonl` that trackers log, and the names that people know from other trainers."""


def _reported_metrics(report: "StepReport") -> dict[str, float]:
    """Return what trackers log of a step and, where its weights were validated, of the losses: no unknown values, and
    no infinite ones but for losses and the like."""
    metrics = {name: float(value) for key, name in _NAMES.items() if (value := report.row[key]) is not None}
    metrics = {name: value for name, value in metrics.items() if math.isfinite(value) or name.startswith("train/")}
    return metrics | ({} if report.validation is None else report.validation.metrics())


class TensorBoardLog(Callback):
    """Writes a run's steps as event files of TensorBoard, in `output_dir`/tensorboard. A start after a resume adds a
    file, which makes TensorBoard forget the steps that are trained again."""

    def __init__(self) -> None:
        self._writer: Any = None

    def on_start(self, run: RunStart) -> None:
        """Open a file."""
        from torch.utils.tensorboard.writer import SummaryWriter

        directory = run.output_dir / "tensorboard"
        if run.steps_done == 0 and directory.is_dir():
            # The run begins anew in its directory, as its metrics do.
            for file in directory.glob("events.out.tfevents.*"):
                file.unlink()
        self._writer = SummaryWriter(str(directory), purge_step=run.steps_done or None, flush_secs=10)

    def on_step(self, report: "StepReport") -> None:
        """Log its row."""
        step = int(report.row["step"] or 0)
        for name, value in _reported_metrics(report).items():
            self._writer.add_scalar(name, value, step)

    def on_end(self, end: RunEnd) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class WandbLog(Callback):
    """Writes a run's steps to one run of Weights & Biases, whose identity is kept in `wandb.json` in the output
    directory. Steps are an axis of their own (`train/global_step`), because some are trained again after a resume, and
    theirs only rises. `WANDB_MODE=offline` and other settings of theirs hold."""

    def __init__(self) -> None:
        self._run: Any = None

    def on_start(self, run: RunStart) -> None:
        """Open the run, or go on with it."""
        wandb: Any = import_module("wandb")

        log, file = run.config.log, run.output_dir / "wandb.json"
        run.output_dir.mkdir(parents=True, exist_ok=True)
        # A run that begins anew in the same directory is a new one.
        known = msgspec.json.decode(file.read_bytes())["id"] if run.steps_done and file.is_file() else None
        self._run = wandb.init(
            project=log.project,
            name=log.name or run.output_dir.absolute().name,
            id=known,
            resume="allow" if known else None,
            dir=str(run.output_dir),
            config=msgspec.to_builtins(run.config) | {"layout": run.layout, "parameters": run.model.num_parameters},
            settings=wandb.Settings(console="off", quiet=True),
        )
        file.write_bytes(msgspec.json.encode({"id": self._run.id}) + b"\n")
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)

    def on_step(self, report: "StepReport") -> None:
        """Log its row."""
        self._run.log(_reported_metrics(report) | {STEP: report.row["step"]})

    def on_end(self, end: RunEnd) -> None:
        """Close the run."""
        if self._run is not None:
            self._run.finish(exit_code=1 if end.reason == "failed" else 0)
            self._run = None
