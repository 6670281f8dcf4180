"""`steps.jsonl`: plans and measured timelines of a run's steps, so that its page can show any of them.

One line a step, appended and read back: the plan as in `plan.json`, compressed, and the timeline as in `measured.npz`.
A page holds what a browser opens at once: from 12,000 tasks or 200 steps on only every second, fourth, eighth ...
step stays, and the file is written anew without the others. Steps that a resumed run repeats stand there twice: the
last one counts; a torn last line (a crash while writing) is left out.
Price: some hundred bytes a task on disk; at most `MOST_TASKS` are in a page, 20 bytes each in large steps, 100 in
small ones.
"""

import base64
import io
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from evenload.errors import DataError
from evenload.stepplan.plan_file import decode_plan_file, encode_plan_file
from evenload.types.base import Frozen
from evenload.types.plan import StepPlan
from evenload.types.timeline import Timeline
from evenload.types.timeline_file import read_timeline, write_timeline

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
