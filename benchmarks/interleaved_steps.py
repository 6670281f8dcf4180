"""Global batches trained by turns under several variants, in one set of CPU processes: what `reduction.py` does."""

import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.multiprocessing
from rich.console import Console

from evenload.cli.worker_setup import run_coefficients, started_rank
from evenload.config.planner import run_planner
from evenload.config.train_config import TrainConfig, layout_of, load_train_config
from evenload.cost.coefficients import CostCoefficients
from evenload.feed.step_maker import PlannedStep, StepMaker
from evenload.plan.planner import RunPlanner
from evenload.runtime.step_source import PreparedStep, prepare_step
from evenload.runtime.trainer import Trainer


@dataclass(frozen=True, eq=False)
class BenchRank:
    """One process of a benchmark.

    Args:
        costs: as a run measures them at its start, just before.
    """

    config: TrainConfig
    trainer: Trainer
    costs: CostCoefficients
    memory_cap_bytes: int

    def planned_step(self, costs: CostCoefficients, config: TrainConfig | None = None) -> PlannedStep:
        """The first global batch, with its tokens, planned under these costs."""
        config, trainer, mesh = config or self.config, self.trainer, self.trainer.mesh
        planner = run_planner(config, trainer.model, mesh.layout, costs, self.memory_cap_bytes, mesh.ranks_per_machine)
        source = trainer.new_loader()
        maker = StepMaker(
            source,
            RunPlanner(planner, config.plan.strategy, may_delay=False),
            replicas=lambda layout: layout.replicas(mesh.num_ranks),
            max_pack_tokens=config.max_pack_tokens,
            waiting=mesh.watch.waiting,
        )
        step = maker.next()
        source.close()
        assert step is not None
        return step

    def by_turns(
        self,
        steps: Mapping[str, tuple[TrainConfig, PlannedStep]],
        rounds: int,
        costs: CostCoefficients,
        keys: Sequence[str],
        *,
        repeats: int = 1,
        goes_on: bool = False,
    ) -> dict[str, list[dict[str, Any]]]:
        """Rows of metrics by variant, at learning rate 0; every other round in the other order, one before does not
        count. Rows on rank 0 only.

        Args:
            repeats: steps of a variant in a row, of which the last counts.
            goes_on: weights are gathered in the next step.
        """
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in steps}
        for turn in range(rounds + 1):
            for name, (config, step) in sorted(steps.items(), reverse=bool(turn % 2)):
                self.trainer.step_trainer.config = config
                for repeat in range(repeats):
                    prepared = PreparedStep(step, prepare_step(step.plan, step.tokens, self.trainer.mesh))
                    trained = self.trainer.step_trainer.run(prepared, costs, learning_rate=0.0, goes_on=goes_on)
                    report = trained.report
                    if report is not None and turn and repeat == repeats - 1:
                        found[name].append({key: report.row[key] for key in keys})
        return found


@contextmanager
def bench_rank(directory: str, num_layers: int, settings: list[str]) -> Iterator[BenchRank]:
    """A rank of a run in float32, a thread a process, with costs measured now."""
    settings = ["model.dtype=float32", "train.threads_per_process=1", *settings]
    config = load_train_config(Path(directory) / "config.toml", settings)
    with started_rank(config, layout_of(config, num_layers)) as setup:
        trainer = Trainer(config, setup.mesh)
        costs = run_coefficients(trainer, Path(directory) / "cache", setup.threads, Console(quiet=True))
        yield BenchRank(config, trainer, costs, setup.memory_cap_bytes)


def spawn_ranks(num_ranks: int, run_rank: Callable[..., None], *arguments: object) -> None:
    """`run_rank(rank, *arguments)` in a process each, which find each other."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(_run_rank, (num_ranks, port, run_rank, arguments), nprocs=num_ranks)


def _run_rank(rank: int, num_ranks: int, port: int, run_rank: Callable[..., None], arguments: tuple) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    run_rank(rank, *arguments)
