"""`WandbLog`: a run's steps in Weights & Biases.

The identity of the run there is kept in `wandb.json` in the output directory, so that a resumed run goes on in it.
Steps are an axis of their own (`train/global_step`), because those since the last checkpoint are trained again after a
resume, and Weights & Biases takes its own steps in rising order only. `WANDB_MODE=offline` and other settings of theirs
hold as ever.
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from evenload.integrations.callback import Callback, RunEnd, RunStart
from evenload.integrations.logged_metrics import STEP, reported_metrics
from evenload.types.base import Frozen

if TYPE_CHECKING:
    from evenload.runtime.step_metrics import StepReport

IDENTITY_FILE = "wandb.json"


class _Identity(Frozen):
    """wandb.json."""

    id: str


class WandbLog(Callback):
    """One run of Weights & Biases, whatever number of starts ours has."""

    def __init__(self) -> None:
        self._run: Any = None

    def on_start(self, run: RunStart) -> None:
        """Open the run, or go on with it."""
        wandb: Any = import_module("wandb")

        log, file = run.config.log, run.output_dir / IDENTITY_FILE
        run.output_dir.mkdir(parents=True, exist_ok=True)
        # A run that begins anew in the same directory is another one.
        known = _read_identity(file) if run.steps_done else None
        self._run = wandb.init(
            project=log.project,
            name=log.name or run.output_dir.absolute().name,
            id=known,
            resume="allow" if known else None,
            dir=str(run.output_dir),
            config=msgspec.to_builtins(run.config) | {"layout": run.layout, "parameters": run.model.num_parameters},
            settings=wandb.Settings(console="off", quiet=True),
        )
        file.write_bytes(msgspec.json.encode(_Identity(id=self._run.id)) + b"\n")
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)

    def on_step(self, report: "StepReport") -> None:
        """Its row."""
        self._run.log(reported_metrics(report) | {STEP: report.row["step"]})

    def on_end(self, end: RunEnd) -> None:
        """Close the run."""
        if self._run is not None:
            self._run.finish(exit_code=1 if end.reason == "failed" else 0)
            self._run = None


def _read_identity(file: Path) -> str | None:
    return msgspec.json.decode(file.read_bytes(), type=_Identity).id if file.is_file() else None
