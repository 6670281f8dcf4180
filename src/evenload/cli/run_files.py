"""The files that a training run leaves in its output directory, written by rank 0.

    metrics.jsonl   one row a step             measured.npz  last step's timeline
    config.json     resolved settings          trace.json    last step, predicted and measured (Perfetto)
    cost.json       cost model used            report.html   all of it for people
    run.json        facts and ledger           plan.json     last step's plan, re-simulatable
    layouts.jsonl   what was decided about the layout before every step, where it may change
    validation.jsonl  losses of the validation data
    steps.jsonl     plans and measured timelines of the steps that the page can show
    finished.json   written last of all: without it, or with other steps than the checkpoint, the run was killed after
                    its last checkpoint, and the same command exports and finishes the report

All of them are written again and again while the run goes on, so that a run that is killed has them; pictures are made
from these files alone. A line of `steps.jsonl` holds the plan as in `plan.json`, compressed, and the timeline as in
`measured.npz`. A page holds what a browser opens at once: from 12,000 tasks or 200 steps on only every second, fourth,
eighth ... step stays.
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
from rich.console import Console

from evenload.cli.comparison import step_view
from evenload.cli.launch import signal_name
from evenload.cli.options import indented_json, print_lines
from evenload.cli.run_lines import batch_size
from evenload.cost.coefficients import CostCoefficients, read_coefficients, write_coefficients
from evenload.cost.pack_cost import PackCosts
from evenload.cost.validity import fill_between_layouts
from evenload.errors import DataError
from evenload.explore.timelines import split_step_of_plan
from evenload.report.chrome_trace import label_packs, write_chrome_trace
from evenload.report.html import write_report
from evenload.report.run_files import (
    append_metrics,
    append_rows,
    drop_torn_line,
    latest_per_step,
    read_decisions,
    read_metrics,
    read_rows,
    read_validations,
)
from evenload.report.run_report import RunReport, RunSection
from evenload.runtime.comm.mesh import share_of_first
from evenload.runtime.model.export_files import exported_tokenizer_note
from evenload.runtime.step_metrics import StepReport
from evenload.runtime.trainer import Trainer
from evenload.stepplan.plan_file import decode_plan_file, encode_plan_file
from evenload.types.base import Frozen
from evenload.types.layout import ParallelLayout
from evenload.types.model import ModelSpec
from evenload.types.plan import StepPlan
from evenload.types.text import counted
from evenload.types.timeline import Timeline, read_timeline, write_timeline

MOST_TASKS, MOST_STEPS = 12_000, 200
"""Of all steps in `steps.jsonl` together; a step alone that has more tasks is left out."""


class StepLine(Frozen):
    """A line of `steps.jsonl`: a step, its tasks, and base64 of the compressed plan and of the timeline."""

    step: int
    tasks: int
    plan: str
    measured: str


class StepFile:
    """Keeps steps while a run goes on, as many as a page takes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tasks = {line.step: line.tasks for line in _step_lines(path)}
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
            plan=base64.b64encode(zlib.compress(encode_plan_file((plan,)))).decode(),
            measured=base64.b64encode(content.getvalue()).decode(),
        )
        append_rows(self._path, [line])
        self._tasks[line.step] = line.tasks
        every = self._every
        while sum(self._tasks.values()) > MOST_TASKS or len(self._tasks) > MOST_STEPS:
            self._every *= 2
            self._tasks = {step: tasks for step, tasks in self._tasks.items() if step % self._every == 0}
        if self._every == every:
            return
        latest = {line.step: line for line in _step_lines(self._path) if line.step in self._tasks}
        new = self._path.with_name(f".{self._path.name}.new")
        new.write_bytes(b"")
        append_rows(new, [latest[step] for step in sorted(latest)])
        os.replace(new, self._path)


def read_steps(path: Path, newest: int | None = None) -> Iterator[tuple[StepPlan, Timeline]]:
    """Read all steps, or so many of the last, by ascending step; the last line of each counts, as a resumed run repeats
    steps. None where there is no file, `DataError` where a whole line is no step."""
    latest = {line.step: line for line in _step_lines(path)}
    for step in sorted(latest)[-(newest or len(latest)) :]:
        line = latest[step]
        try:
            (plan,) = decode_plan_file(zlib.decompress(base64.b64decode(line.plan)))
            measured = read_timeline(io.BytesIO(base64.b64decode(line.measured)))
        except (ValueError, zlib.error) as error:
            raise DataError(f"{path}: step {step} is no plan and timeline ({error}); remove its line") from error
        yield plan, measured


def _step_lines(path: Path) -> list[StepLine]:
    return read_rows(path, StepLine, "step")


class RunFacts(Frozen):
    """run.json: what ran on what, and the account of its tokens."""

    model: ModelSpec
    memory_cap_bytes: int
    facts: tuple[tuple[str, str], ...]
    ledger: tuple[str, ...]


class RunWriter:
    """Writes one run's files. Where it goes on from a checkpoint (`resumed`), steps after that are trained again and
    have a row for each time; else files of an earlier run are replaced."""

    def __init__(
        self, trainer: Trainer, costs: CostCoefficients, memory_cap_bytes: int, *, resumed: Path | None
    ) -> None:
        self._config, self._model, self._costs = trainer.config, trainer.model, costs
        self._memory_cap_bytes, self._tokenizer = memory_cap_bytes, trainer.run_tokenizer_text
        self._directory = Path(trainer.config.train.output_dir)
        self._resumed = resumed
        self._steps: StepFile | None = None
        self._next_s = 0.0

    def step(self, report: StepReport) -> None:
        """Append a step's rows; write everything else where its time has come."""
        directory = self._directory
        if self._steps is None:
            self._begin()
            self._steps = StepFile(directory / "steps.jsonl")
        append_metrics(directory / "metrics.jsonl", report.row)
        append_rows(directory / "layouts.jsonl", filter(None, [report.decision]))
        append_rows(directory / "validation.jsonl", filter(None, [report.validation]))
        self._steps.add(report.plan, report.measured)
        every_s = self._config.train.report_every_s
        if every_s and time.monotonic() >= self._next_s:
            from_s = time.monotonic()
            # Every step of a page is simulated again, so until the end it has a few alone.
            self.write(report, newest=8)
            now_s = time.monotonic()
            self._next_s = now_s + max(every_s, (now_s - from_s) / 0.02)  # writing takes 2 % of the time at most

    def _begin(self) -> None:
        directory = self._directory
        directory.mkdir(parents=True, exist_ok=True)
        for name in ("metrics", "layouts", "validation", "steps"):
            path = directory / f"{name}.jsonl"
            if self._resumed is not None:
                drop_torn_line(path)
            else:
                path.unlink(missing_ok=True)
        (directory / "config.json").write_bytes(indented_json(self._config))
        write_coefficients(directory / "cost.json", self._costs)

    def write(self, last: StepReport, newest: int | None = None) -> None:
        """Write everything about the last step, and the pictures, with so many steps on the page (None = all that are
        kept). A reader finds whole files, old or new."""
        facts, cap_bytes = self._facts(last.plan.layout), self._memory_cap_bytes
        run = RunFacts(model=self._model, memory_cap_bytes=cap_bytes, facts=facts, ledger=last.ledger_lines)
        with _replaced_together(self._directory) as new:
            write_timeline(new / "measured.npz", last.measured)
            (new / "plan.json").write_bytes(encode_plan_file((last.plan,)))
            (new / "run.json").write_bytes(indented_json(run))
        self.write_pictures(newest)

    def write_pictures(self, newest: int | None = None) -> None:
        """Draw the pictures once more, from the files of the last step that was written; none where there are none."""
        if not (self._directory / "run.json").is_file():
            return
        drop_torn_line(self._directory / "metrics.jsonl")
        section, facts = read_run(self._directory, newest)
        view = section.steps[-1]
        assert view.plan is not None
        title = f"Evenload: {self._model.name}, {section.name}"
        report = RunReport(title=title, facts=facts.facts, sections=(section,), ledger=facts.ledger)
        with _replaced_together(self._directory) as new:
            write_chrome_trace(new / "trace.json", view.timelines(), label_packs(view.plan))
            write_report(new / "report.html", report)

    def _facts(self, layout: ParallelLayout) -> tuple[tuple[str, str], ...]:
        config, data, model = self._config, self._config.data, self._model
        sizes = f"{model.num_layers} layers, hidden {model.hidden_size}, vocabulary {model.vocab_size:,}"
        versions = f"evenload {version('evenload')}, torch {version('torch')}, Python {platform.python_version()}"
        return (
            ("model", f"{model.name}: {sizes}"),
            ("tokenizer", self._tokenizer),
            ("precision", config.model.dtype),
            ("data", ", ".join(data.sources)),
            ("global batch", batch_size(data.batch_documents, data.batch_tokens)),
            ("longest document", f"{data.max_document_tokens:,} tokens, longer: {data.overlong}"),
            ("layout", layout.describe()),
            ("strategy", config.plan.strategy),
            ("device", self._costs.device),
            ("cost model", self._costs.source),
            ("seeds", f"model {config.train.seed}, data {data.seed}"),
            ("versions", versions),
        )


@contextmanager
def _replaced_together(directory: Path) -> Iterator[Path]:
    """Yield a new directory, whose files then replace those of the same names."""
    with tempfile.TemporaryDirectory(dir=directory, prefix=".writing-") as name:
        yield Path(name)
        for path in Path(name).iterdir():
            os.replace(path, directory / path.name)


def read_run(directory: Path, newest: int | None = None) -> tuple[RunSection, RunFacts]:
    """Read a run as a part of a report, and its facts; with the newest steps, or all that are kept."""
    try:
        facts = msgspec.json.decode((directory / "run.json").read_bytes(), type=RunFacts)
        (plan,) = decode_plan_file((directory / "plan.json").read_bytes())
    except FileNotFoundError as error:
        raise DataError(f"{directory} does not hold a finished run: no {Path(error.filename).name}") from error
    coefficients, decisions = read_coefficients(directory / "cost.json"), read_decisions(directory / "layouts.jsonl")

    # The last step is in files of its own, written together; later ones, if any, are not shown.
    steps = [one for one in read_steps(directory / "steps.jsonl", newest) if one[0].step < plan.step]
    steps.append((plan, read_timeline(directory / "measured.npz")))
    costs: dict[ParallelLayout, PackCosts] = {}
    for layout in dict.fromkeys(one.layout for one, _ in steps):
        # Measured in the layout in which the run starts; completed as the planner of the other layouts has them.
        completed = fill_between_layouts(coefficients, layout)[0] if decisions else coefficients
        costs[layout] = PackCosts(facts.model, completed, layout)
    shown = steps[-(newest or len(steps)) :]
    section = RunSection(
        name=plan.strategy,
        metrics=tuple(latest_per_step(read_metrics(directory / "metrics.jsonl"))),
        steps=tuple(step_view(one, costs[one.layout], measured) for one, measured in shown),
        time_split=split_step_of_plan(plan, costs[plan.layout]),
        memory_limit_bytes=facts.memory_cap_bytes,
        validations=read_validations(directory / "validation.jsonl"),
        layout_decisions=decisions,
    )
    return section, facts


class FinishedRun(Frozen):
    """finished.json: of which run everything is written; exported as `train.export_hf` says."""

    steps_done: int
    is_exported: bool


def show_stopped(console: Console, trainer: Trainer, command: str) -> None:
    name, done = signal_name(trainer.stop_signal), counted(trainer.steps_done, "step")
    print_lines(console, f"stopped by {name} after {done}; nothing is lost. Go on with:\n  {command}")


def leave_finished(
    console: Console, trainer: Trainer, files: RunWriter, last: StepReport | None, *, has_trained: bool, command: str
) -> None:
    """Export the model and say what lies where; what an earlier start of a finished run left undone. Collective."""
    config, directory = trainer.config, Path(trainer.config.train.output_dir)
    is_first_rank = trainer.mesh.rank == 0
    if not has_trained:
        done = share_of_first(_read_finished(directory) if is_first_rank else None, trainer.mesh)
        finished = done or FinishedRun(steps_done=-1, is_exported=False)
        is_whole = finished.steps_done == trainer.steps_done and (finished.is_exported or not config.train.export_hf)
        _show_nothing_left(console, trainer, command, is_whole=is_whole)
        if is_whole:
            return
        if is_first_rank:
            files.write_pictures()
    if config.train.export_hf:
        exported = trainer.export()
        what = f"PEFT adapter {exported}"
        if config.model.lora is None and is_first_rank:
            what = f"Hugging Face model {exported}, {exported_tokenizer_note(exported, config.data, config.model.path)}"
        print_lines(console, what)
        if (average := trainer.export_average()) is not None:
            print_lines(console, f"its moving average (train.ema_decay) {average}")
    if is_first_rank:
        finished = FinishedRun(steps_done=trainer.steps_done, is_exported=config.train.export_hf)
        (directory / "finished.json").write_bytes(msgspec.json.encode(finished) + b"\n")
    if last is not None:
        print_lines(console, "\nledger of documents and tokens", *last.ledger_lines)
    report, trace = directory / "report.html", directory / "trace.json"
    print_lines(console, f"\nreport {report} | trace {trace} (open at ui.perfetto.dev)")


def _read_finished(directory: Path) -> FinishedRun | None:
    try:
        return msgspec.json.decode((directory / "finished.json").read_bytes(), type=FinishedRun)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None


def _show_nothing_left(console: Console, trainer: Trainer, command: str, *, is_whole: bool) -> None:
    train, strategy, saved = trainer.config.train, trainer.config.plan.strategy, trainer.saved_strategy
    print_lines(
        console,
        f"nothing left to train: {train.output_dir} holds a finished run of {counted(trainer.steps_done, 'step')}"
        f"{f' under {saved}' if saved else ''}; raise train.steps or data.epochs to train longer",
    )
    if saved not in ("", strategy):
        other = shlex.quote(f"{train.output_dir.rstrip('/')}-{strategy}")
        print_lines(
            console, f"no step was trained under {strategy}. To compare the two:\n  {command} train.output_dir={other}"
        )
    if not is_whole:
        print_lines(console, "the start that trained it ended before everything was written; that is done now")
