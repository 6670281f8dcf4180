"""Callbacks that ranks of a run import."""

from pathlib import Path

from evenload.integrations.callback import Callback


class Notes(Callback):
    """Writes down what it is told, a line each; raises in `on_step` of a step where asked to."""

    def __init__(self, file: Path, fails_at: int | None = None) -> None:
        self.file, self.fails_at = file, fails_at

    def on_start(self, run):
        self._note(f"start {run.layout} {run.num_ranks} {run.steps_done} {run.output_dir.name} {run.model.num_layers}")

    def on_step(self, report):
        if report.row["step"] == self.fails_at:
            raise ValueError("no such luck")
        self._note(f"step {report.row['step']} {report.plan.step} {report.row['total_tokens']}")

    def on_validation(self, validation):
        self._note(f"validation {validation.step} {len(validation.metrics())} {validation.loss > 0}")

    def on_checkpoint(self, path):
        self._note(f"checkpoint {path.name} {path.is_dir()}")

    def on_end(self, end):
        self._note(f"end {end.steps_done} {end.reason}")

    def _note(self, text):
        with open(self.file, "a") as file:
            file.write(f"{text}\n")
