"""The files that a training run leaves in its output directory, written by rank 0, and `steps.jsonl`, the plans and
measured timelines of its steps.

`steps.jsonl` has one line a step, appended and read back: the plan as in `plan.json`, compressed, and the timeline as
in `measured.npz`. A page holds what a browser opens at once: from 12,000 tasks or 200 steps on only every second,
fourth, eighth ... step stays, and the file is written anew without the others. Of a step that a resumed run repeats the
last line counts; a torn last line (a crash while writing) is left out. Price: some hundred bytes a task on disk; at
most `MOST_TASKS` are in a page, 20 bytes each in large steps, 100 in small ones.
"""

import base64
import io
import os
import platform
import shlex
import tempfile
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import msgspec
import torch.distributed as dist
from rich.console import Console

from evenload.cli.stop_request import signal_name
from evenload.config.train_config import TrainConfig
from evenload.cost.coefficients import CostCoefficients, read_coefficients, write_coefficients
from evenload.cost.pack_cost import PackCosts
from evenload.cost.validity import completed_between_layouts
from evenload.errors import DataError
from evenload.explore.timelines import detailed_timeline, split_planned_step
from evenload.report.chrome_trace import label_packs, write_chrome_trace
from evenload.report.html import write_report
from evenload.report.run_files import (
    append_metrics,
    append_rows,
    drop_torn_line,
    latest_per_step,
    read_decisions,
    read_metrics,
    read_validations,
)
from evenload.report.run_report import RunReport, RunSection, StepView
from evenload.runtime.model.export_files import tokenizer_note
from evenload.runtime.step_metrics import StepReport
from evenload.runtime.trainer import Trainer
from evenload.stepplan.plan_file import decode_plan_file, encode_plan_file
from evenload.types.base import Frozen
from evenload.types.layout import ParallelLayout
from evenload.types.model import ModelSpec
from evenload.types.plan import StepPlan
from evenload.types.run import Validation
from evenload.types.text import counted
from evenload.types.timeline import Timeline, read_timeline, write_timeline

MOST_TASKS, MOST_STEPS = 12_000, 200
"""Of all steps in the file together; a step alone that has more tasks is left out."""


class StepLine(Frozen):
    """A line: a step, its tasks, and the two texts."""

    step: int
    tasks: int
    plan: str
    measured: str


class StepFile:
    """Keeps steps while a run goes on, as many as a page takes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tasks = {line.step: line.tasks for line in _lines(path)}
        # Powers of two, so that a thinned file is a part of what it was.
        steps = [step for step in self._tasks if step]
        self._every = min((step & -step for step in steps), default=1) if len(steps) > 1 else 1

    def add(self, plan: StepPlan, measured: Timeline) -> None:
        """Append a step, if its turn has come, and thin the file where it has become too large."""
        if plan.step % self._every or measured.num_tasks > MOST_TASKS:
            return
        content = io.BytesIO()
        write_timeline(content, measured)
        line = StepLine(
            step=plan.step,
            tasks=measured.num_tasks,
            plan=_text(zlib.compress(encode_plan_file((plan,)))),
            measured=_text(content.getvalue()),
        )
        with open(self._path, "ab") as file:
            file.write(msgspec.json.encode(line) + b"\n")
        self._tasks[line.step] = line.tasks
        if self._is_too_large():
            self._thin()

    def _is_too_large(self) -> bool:
        return sum(self._tasks.values()) > MOST_TASKS or len(self._tasks) > MOST_STEPS

    def _thin(self) -> None:
        while self._is_too_large():
            self._every *= 2
            self._tasks = {step: tasks for step, tasks in self._tasks.items() if step % self._every == 0}
        latest = {line.step: line for line in _lines(self._path) if line.step in self._tasks}
        new = self._path.with_name(f".{self._path.name}.new")
        new.write_bytes(b"".join(msgspec.json.encode(latest[step]) + b"\n" for step in sorted(latest)))
        os.replace(new, self._path)


def read_steps(path: Path, newest: int | None = None) -> Iterator[tuple[StepPlan, Timeline]]:
    """All, or so many of the last, by ascending step; none where there is no file. `DataError` where a whole line is no
    step."""
    latest = {line.step: line for line in _lines(path)}
    for step in sorted(latest)[-(newest or len(latest)) :]:
        line = latest[step]
        try:
            (plan,) = decode_plan_file(zlib.decompress(base64.b64decode(line.plan)))
            measured = read_timeline(io.BytesIO(base64.b64decode(line.measured)))
        except (ValueError, zlib.error) as error:
            raise DataError(f"{path}: step {step} is no plan and timeline ({error}); remove its line") from error
        yield plan, measured


def _lines(path: Path) -> Iterator[StepLine]:
    try:
        *lines, _ = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return
    for number, line in enumerate(lines, start=1):
        try:
            yield msgspec.json.decode(line, type=StepLine)
        except msgspec.MsgspecError as error:
            raise DataError(f"{path}, line {number} is no step ({error}); remove the line") from error


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode("ascii")


# What a training run leaves in its output directory, written by rank 0.
#
# metrics.jsonl   one row a step             measured.npz  last step's timeline
# config.json     resolved settings          trace.json    last step, predicted and measured (Perfetto)
# cost.json       cost model used            report.html   all of it for people
# run.json        facts and ledger           plan.json     last step's plan, re-simulatable
# layouts.jsonl   what was decided about the layout before every step, where it may change
# validation.jsonl  losses of the validation data; samples.jsonl  what the model wrote
# steps.jsonl     plans and measured timelines of the steps that the page can show
#
# Pictures are made from these files alone, so runs can be put side by side later. All of them are written again and
# again while the run goes on, so that a run that is killed has them.


class RunFacts(Frozen):
    """run.json: what ran on what, and the account of its tokens."""

    model: ModelSpec
    memory_cap_bytes: int
    facts: tuple[tuple[str, str], ...]
    ledger: tuple[str, ...]


# Writing may take this share of the run's time.
_WRITING_SHARE = 0.02
# Every step of a page is simulated again, so while the run goes on its page has the last ones; at the end it has all.
_STEPS_MEANWHILE = 8


class RunWriter:
    """Writes one run's files.

    Args:
        resumed: the checkpoint from which an earlier run is continued; steps after it are trained again and have a row
            for each time. None = files of an earlier run are replaced.
    """

    def __init__(
        self,
        trainer: Trainer,
        costs: CostCoefficients,
        memory_cap_bytes: int,
        *,
        resumed: Path | None,
    ) -> None:
        self._config, self._model, self._costs = trainer.config, trainer.model, costs
        self._memory_cap_bytes, self._tokenizer = memory_cap_bytes, trainer.tokenizer_fact
        self._directory = Path(trainer.config.train.output_dir)
        self._metrics, self._layouts = self._directory / "metrics.jsonl", self._directory / "layouts.jsonl"
        self._validations = self._directory / "validation.jsonl"
        self._samples = self._directory / "samples.jsonl"
        self._resumed = resumed
        self._steps: StepFile | None = None
        self._next_s = 0.0

    def add_step(self, report: StepReport) -> None:
        """Append a step's row; write everything else where its time has come."""
        if self._steps is None:
            self._steps = self._begin()
        append_metrics(self._metrics, report.row)
        if report.decision is not None:
            append_rows(self._layouts, [report.decision])
        if report.validation is not None:
            append_rows(self._validations, [report.validation])
        append_rows(self._samples, report.samples)
        self._steps.add(report.plan, report.measured)
        every_s = self._config.train.report_every_s
        if every_s and time.monotonic() >= self._next_s:
            from_s = time.monotonic()
            self.write(report, newest=_STEPS_MEANWHILE)
            now_s = time.monotonic()
            self._next_s = now_s + max(every_s, (now_s - from_s) / _WRITING_SHARE)

    def add_validation(self, validation: Validation) -> None:
        """Append a pass that was made before the first step of this start, so after one of an earlier start."""
        drop_torn_line(self._validations)
        append_rows(self._validations, [validation])

    def _begin(self) -> StepFile:
        directory, steps = self._directory, self._directory / "steps.jsonl"
        directory.mkdir(parents=True, exist_ok=True)
        for path in (self._metrics, self._layouts, self._validations, self._samples, steps):
            if self._resumed is not None:
                drop_torn_line(path)
            else:
                path.unlink(missing_ok=True)
        pretty = msgspec.json.format(msgspec.json.encode(self._config), indent=2)
        (directory / "config.json").write_bytes(pretty + b"\n")
        write_coefficients(directory / "cost.json", self._costs)
        return StepFile(steps)

    def write(self, last: StepReport, newest: int | None = None) -> None:
        """Write everything about the last step, and the pictures. A reader finds whole files, old or new.

        Args:
            newest: how many steps the page gets; all that are kept if None.
        """
        run = RunFacts(
            model=self._model,
            memory_cap_bytes=self._memory_cap_bytes,
            facts=_facts(self._config, self._model, self._costs, self._tokenizer, last),
            ledger=last.ledger_lines,
        )
        with _replaced_together(self._directory) as new:
            write_timeline(new / "measured.npz", last.measured)
            (new / "plan.json").write_bytes(encode_plan_file((last.plan,)))
            (new / "run.json").write_bytes(msgspec.json.format(msgspec.json.encode(run), indent=2) + b"\n")
        self.write_pictures(newest)

    def write_pictures(self, newest: int | None = None) -> None:
        """The pictures once more, from the files of the last step that was written; none where there are no files."""
        if not (self._directory / "run.json").is_file():
            return
        drop_torn_line(self._metrics)
        section, facts = read_run(self._directory, newest)
        view = section.steps[-1]
        assert view.plan is not None
        with _replaced_together(self._directory) as new:
            write_chrome_trace(new / "trace.json", view.timelines(), label_packs(view.plan))
            write_report(
                new / "report.html",
                RunReport(
                    title=f"Evenload: {self._model.name}, {section.name}",
                    facts=facts.facts,
                    sections=(section,),
                    ledger=facts.ledger,
                ),
            )


@contextmanager
def _replaced_together(directory: Path) -> Iterator[Path]:
    """A new directory, whose files then replace those of the same names."""
    with tempfile.TemporaryDirectory(dir=directory, prefix=".writing-") as name:
        yield Path(name)
        for path in Path(name).iterdir():
            os.replace(path, directory / path.name)


def read_run(directory: Path, newest: int | None = None) -> tuple[RunSection, RunFacts]:
    """A finished run as a part of a report, and its facts; with the newest steps, or all that are kept."""
    try:
        facts = msgspec.json.decode((directory / "run.json").read_bytes(), type=RunFacts)
        (plan,) = decode_plan_file((directory / "plan.json").read_bytes())
    except FileNotFoundError as error:
        raise DataError(f"{directory} does not hold a finished run: no {Path(error.filename).name}") from error
    coefficients, decisions = read_coefficients(directory / "cost.json"), read_decisions(directory / "layouts.jsonl")
    costs: dict[ParallelLayout, PackCosts] = {}

    def costs_in(layout: ParallelLayout) -> PackCosts:
        if layout not in costs:
            # Measured in the layout in which the run starts; completed as the planner of the other layouts has them.
            found = completed_between_layouts(coefficients, layout)[0] if decisions else coefficients
            costs[layout] = PackCosts(facts.model, found, layout)
        return costs[layout]

    def view(plan: StepPlan, measured: Timeline) -> StepView:
        predicted = detailed_timeline(plan, costs_in(plan.layout))
        return StepView(step=plan.step, predicted=predicted, measured=measured, plan=plan)

    kept = {step.step: (step, measured) for step, measured in read_steps(directory / "steps.jsonl", newest)}
    # The last step is in files of its own, written together; of later ones these do not know.
    kept = {step: one for step, one in kept.items() if step < plan.step}
    kept[plan.step] = (plan, read_timeline(directory / "measured.npz"))
    section = RunSection(
        name=plan.strategy,
        metrics=tuple(latest_per_step(read_metrics(directory / "metrics.jsonl"))),
        steps=tuple(view(*kept[step]) for step in sorted(kept)[-(newest or len(kept)) :]),
        time_split=split_planned_step(plan, costs_in(plan.layout)),
        memory_limit_bytes=facts.memory_cap_bytes,
        validations=read_validations(directory / "validation.jsonl"),
        layout_decisions=decisions,
    )
    return section, facts


def _facts(
    config: TrainConfig, model: ModelSpec, costs: CostCoefficients, tokenizer: str, last: StepReport
) -> tuple[tuple[str, str], ...]:
    data = config.data
    batch = (
        f"{data.batch_tokens:,} tokens" if data.batch_documents is None else counted(data.batch_documents, "document")
    )
    return (
        (
            "model",
            f"{model.name}: {model.num_layers} layers, hidden {model.hidden_size}, vocabulary {model.vocab_size:,}",
        ),
        ("tokenizer", tokenizer),
        ("precision", config.model.dtype),
        ("data", ", ".join(data.sources)),
        ("global batch", batch),
        ("longest document", f"{data.max_document_tokens:,} tokens, longer: {data.overlong}"),
        ("layout", last.plan.layout.describe()),
        ("strategy", config.plan.strategy),
        ("device", costs.device),
        ("cost model", costs.source),
        ("seeds", f"model {config.train.seed}, data {data.seed}"),
        ("versions", f"evenload {version('evenload')}, torch {version('torch')}, Python {platform.python_version()}"),
    )


# How a run ends: stopped by a signal, finished, or found to be finished already.
#
# `finished.json` is written last of all. A run of which it is missing, or tells of other steps than the checkpoint,
# was killed after its last checkpoint: the same command then exports and finishes the report.

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
