"""Runs of four processes of which one is killed at a random moment, and what became of them.

A *moment* is a place (a function of ours), a call of it, and a share of the time that such a call takes; the seed says
which. The same run without a kill is the yardstick: losses of all steps, and weights at the end.
"""

import itertools
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from evenload.cli.launch_survivors import run_surviving
from evenload.cli.train_worker import RunTask, run_worker
from evenload.config.planner import run_planner
from evenload.config.train_config import load_train_config
from evenload.errors import EvenloadError
from evenload.report.run_files import read_metrics
from evenload.runtime.comm import membership
from evenload.runtime.trainer import Trainer
from shrink_cases import PLACES
from small_run import write_small_costs, write_small_run
from switch_cases import ScriptedPlanner

RANKS, STEPS, STEPS_IN_LAYOUT, DOCUMENTS = 4, 12, 2, 6
LIMIT_S = 480.0
"""A run that takes longer hangs: it takes 10 s on a quiet machine, and waits for one that stands still for `TIMEOUT_S`
and `PATIENCE_S`."""
TIMEOUT_S = 60.0

PATIENCE_S = 20.0
"""For ranks that nobody saw die."""

CALLS = {
    # By place, how many calls a run of `STEPS` makes on a rank, at least.
    **{"forward": 20, "backward": 20, "update": STEPS, "kept state": STEPS, "mark": STEPS},
    **{"switch": 5, "moving state": 5, "save": 2},
}
RECOVERY = ("recovery", "takeover", "kept state", "mark")
"""Where a second one may be killed while the others go on."""
KINDS = (*CALLS, "recovery")


@dataclass(frozen=True)
class Kill:
    """A rank, at a share of a call that others of its kind precede; `after_loss`: counted from its first recovery;
    `how`: SIGSTOP leaves a process that does nothing, and may do so again."""

    rank: int
    place: str
    calls_before: int
    share: float
    after_loss: bool = False
    how: int = signal.SIGKILL


@dataclass(frozen=True)
class Outcome:
    """What became of a run.

    Args:
        end: "went on", "stopped" by an error, or "hung".
        num_killed: ranks that the moment came for.
        said: the error, or in words what is wrong with what was trained; "" = nothing.
        steps_again: rows of metrics beside one for each step.
        difference: largest relative difference of a loss or of a tensor's norm to the undisturbed run.
    """

    kills: tuple[Kill, ...]
    end: str
    num_killed: int
    said: str
    steps_again: int
    difference: float
    seconds: float


def drawn_kills(seed: int) -> tuple[Kill, ...]:
    """One kill, or two where the second is in the recovery after the first; kinds take turns."""
    draw = random.Random(seed)
    kind = KINDS[seed % len(KINDS)]
    first, second = draw.sample(range(RANKS), 2)
    if kind != "recovery":
        return (Kill(first, kind, draw.randrange(CALLS[kind]), draw.random()),)
    place = draw.choice(("forward", "backward", "update"))
    early = Kill(first, place, draw.randrange(CALLS[place]), draw.random())
    return early, Kill(second, draw.choice(RECOVERY), 0, draw.random(), after_loss=True)


class Campaign:
    """Runs on one small corpus.

    Args:
        replacements: processes that may come for killed ones.
    """

    def __init__(self, directory: Path, replacements: int = 0) -> None:
        settings = f"""
            max_document_tokens = 256
            batch_documents = {DOCUMENTS}
            [train]
            steps = {STEPS}
        """
        texts = (f"document {i} " * (1 + (i * 7) % 5) for i in range(40))
        self._directory, self._replacements = directory, replacements
        self._config = write_small_run(directory, texts, settings, tied=True)
        costs = write_small_costs(directory, 8, pp=4)
        self._common = [
            *("model.dtype=float64", "train.threads_per_process=1", "plan.strategy=balanced", "parallel.pp=4"),
            *('plan.layouts=["pp=2", "pp=1"]', "optimizer.learning_rate=1e-3", f"train.cost_file={costs}"),
            *("train.on_lost_rank=shrink", f"train.timeout_s={TIMEOUT_S}", "train.checkpoint_every_steps=5"),
            *("train.survivor_memory=shared", f"train.replace_lost_ranks={replacements}"),
        ]
        outcome = self.run("undisturbed", ())
        assert outcome.end == "went on", outcome
        self._losses, self._weights = self._results("undisturbed")

    def run(self, name: str, kills: tuple[Kill, ...]) -> Outcome:
        """One run."""
        overrides = [*self._common, f"train.output_dir={self._directory / name}"]
        marks = self._directory / f"{name}-killed"
        marks.mkdir()
        task = (str(self._config), overrides, kills, str(self._directory / "costs"), str(marks))
        hangs = threading.Event()

        def end() -> None:
            hangs.set()
            for process in multiprocessing.active_children():
                process.kill()

        limit = threading.Timer(LIMIT_S, end)
        limit.start()
        from_s, said = time.monotonic(), ""
        try:
            run_surviving(
                train_and_be_killed,
                task,
                RANKS,
                grace_s=60.0,
                num_replacements=self._replacements,
                keeps_state=True,
            )
        except EvenloadError as error:
            said = f"{type(error).__name__}: {error}"
        finally:
            limit.cancel()
        seconds = time.monotonic() - from_s
        num_killed = len(list(marks.iterdir()))
        if hangs.is_set() or said:
            return Outcome(kills, "hung" if hangs.is_set() else "stopped", num_killed, said, 0, 0.0, seconds)
        rows = read_metrics(self._directory / name / "metrics.jsonl")
        again = len(rows) - len({row["step"] for row in rows})
        difference = 0.0 if name == "undisturbed" else self._difference(name)
        return Outcome(kills, "went on", num_killed, "", again, difference, seconds)

    def _results(self, name: str) -> tuple[list[float], dict[str, np.ndarray]]:
        latest = {int(row["step"] or 0): float(row["loss"] or 0) for row in self._rows(name)}
        weights: dict[str, np.ndarray] = {}
        for file in sorted((self._directory / name / "model").glob("*.safetensors")):
            weights |= load_file(file)
        return [latest[step] for step in sorted(latest)], weights

    def _rows(self, name: str) -> list:
        return read_metrics(self._directory / name / "metrics.jsonl")

    def _difference(self, name: str) -> float:
        losses, weights = self._results(name)
        assert len(losses) == len(self._losses)
        assert weights.keys() == self._weights.keys()
        of_losses = (abs(a - b) / abs(b) for a, b in zip(losses, self._losses, strict=True))
        of_weights = (
            float(np.linalg.norm(weights[key] - wanted) / max(np.linalg.norm(wanted), 1e-12))
            for key, wanted in self._weights.items()
        )
        return max(itertools.chain(of_losses, of_weights))


def train_and_be_killed(
    config_file: str, overrides: list[str], kills: tuple[Kill, ...], cache: str, marks: str, line
) -> int:
    """As a rank of our launcher, whose layout changes every few steps; leaves a file in `marks` before it is killed."""
    rank = int(os.environ["RANK"])
    membership.PATIENCE_S = PATIENCE_S
    for kill in kills:
        if kill.rank == rank:
            _arm(kill, Path(marks) / str(rank))
    Trainer.planner = _scripted_planner(Trainer.planner)
    task = RunTask(
        config=load_train_config(Path(config_file), overrides), cache=Path(cache), command="the same command"
    )
    return run_worker(task, line)


def _scripted_planner(own: Callable) -> Callable:
    def planner(self, coefficients, memory_cap_bytes):
        layouts = self.meshes.layouts
        if len(layouts) == 1:
            return own(self, coefficients, memory_cap_bytes)
        planners = [run_planner(self.config, self.model, one, coefficients, memory_cap_bytes) for one in layouts]
        return ScriptedPlanner(planners, [step // STEPS_IN_LAYOUT % len(layouts) for step in range(STEPS)])

    return planner


def _arm(kill: Kill, mark: Path) -> None:
    """Let the rank die in its place; the time of a call is that of the one before."""
    owner, name = PLACES[kill.place]
    function, went_on = getattr(owner, name), [not kill.after_loss]
    calls, last_s = [0], [0.0]

    def deadly(*arguments, **options):
        if not went_on[0]:
            return function(*arguments, **options)
        calls[0] += 1
        if calls[0] > kill.calls_before:
            moment = (kill.share * last_s[0], kill.how, mark)
            threading.Thread(target=_die_after, args=moment, daemon=True).start()
        from_s = time.perf_counter()
        try:
            return function(*arguments, **options)
        finally:
            last_s[0] = time.perf_counter() - from_s

    setattr(owner, name, deadly)
    if kill.after_loss:
        recovery_owner, recovery = PLACES["recovery"]
        going_on = getattr(recovery_owner, recovery)

        def notes(*arguments, **options):
            went_on[0] = True
            return going_on(*arguments, **options)

        setattr(recovery_owner, recovery, notes)


def _die_after(seconds: float, how: int, mark: Path) -> None:
    time.sleep(seconds)
    mark.touch()
    os.kill(os.getpid(), how)
