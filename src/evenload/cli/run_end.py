"""How a run ends: stopped by a signal, finished, or found to be finished already.

`finished.json` is written last of all. A run of which it is missing, or tells of other steps than the checkpoint, was
killed after its last checkpoint: the same command then exports and finishes the report.
"""

import shlex
from pathlib import Path

import msgspec
import torch.distributed as dist
from rich.console import Console

from evenload.cli.run_files import RunWriter
from evenload.cli.stop_request import signal_name
from evenload.runtime.model.export_files import tokenizer_note
from evenload.runtime.step_metrics import StepReport
from evenload.runtime.trainer import Trainer
from evenload.types.base import Frozen
from evenload.types.text import counted

FINISHED_FILE = "finished.json"


class FinishedRun(Frozen):
    """finished.json: of which run everything is written; exported as `train.export_hf` says."""

    steps_done: int
    is_exported: bool


def show_stopped(console: Console, trainer: Trainer, command: str) -> None:
    name = signal_name(trainer.stop_signal)
    console.print(
        f"stopped by {name} after {counted(trainer.steps_done, 'step')}; nothing is lost. Go on with:\n  {command}",
        soft_wrap=True,
        markup=False,
    )


def leave_finished(
    console: Console, trainer: Trainer, files: RunWriter, last: StepReport | None, *, has_trained: bool, command: str
) -> None:
    """Export the model and say what lies where; what an earlier start of a finished run left undone. Collective."""
    config, directory = trainer.config, Path(trainer.config.train.output_dir)
    if not has_trained:
        found = [_read_finished(directory) if trainer.mesh.rank == 0 else None]
        dist.broadcast_object_list(found, src=0, group=trainer.mesh.control)
        done = found[0]
        is_whole = (
            done is not None
            and done.steps_done == trainer.steps_done
            and (done.is_exported or not config.train.export_hf)
        )
        _show_nothing_left(console, trainer, command, is_whole=is_whole)
        if is_whole:
            return
        if trainer.mesh.rank == 0:
            files.write_pictures()
    if config.train.export_hf:
        what = "Hugging Face model" if config.model.lora is None else "PEFT adapter"
        exported = trainer.export()
        is_told = trainer.mesh.rank == 0 and config.model.lora is None
        note = f", {tokenizer_note(exported, config.data, config.model.path)}" if is_told else ""
        console.print(f"{what} {exported}{note}", soft_wrap=True)
        if (average := trainer.export_average()) is not None:
            console.print(f"its moving average (train.ema_decay) {average}", soft_wrap=True)
    if trainer.mesh.rank == 0:
        done = FinishedRun(steps_done=trainer.steps_done, is_exported=config.train.export_hf)
        (directory / FINISHED_FILE).write_bytes(msgspec.json.encode(done) + b"\n")
    if last is not None:
        console.print("\n".join(["", "ledger of documents and tokens", *last.ledger_lines]), soft_wrap=True)
    written = f"\nreport {directory / 'report.html'} | trace {directory / 'trace.json'} (open at ui.perfetto.dev)"
    console.print(written, soft_wrap=True)


def _read_finished(directory: Path) -> FinishedRun | None:
    try:
        return msgspec.json.decode((directory / FINISHED_FILE).read_bytes(), type=FinishedRun)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None


def _show_nothing_left(console: Console, trainer: Trainer, command: str, *, is_whole: bool) -> None:
    train, strategy = trainer.config.train, trainer.config.plan.strategy
    lines = [
        f"nothing left to train: {train.output_dir} holds a finished run of {counted(trainer.steps_done, 'step')}"
        f"{f' under {trainer.saved_strategy}' if trainer.saved_strategy else ''}; raise train.steps or data.epochs to "
        "train longer"
    ]
    if trainer.saved_strategy not in ("", strategy):
        other = shlex.quote(f"{train.output_dir.rstrip('/')}-{strategy}")
        lines.append(f"no step was trained under {strategy}. To compare the two:\n  {command} train.output_dir={other}")
    if not is_whole:
        lines.append("the start that trained it ended before everything was written; that is done now")
    console.print("\n".join(lines), soft_wrap=True, markup=False)
