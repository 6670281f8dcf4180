"""Run the same global batches under several strategies, interleaved step by step in one set of processes.

One round warms up, then rounds count. A round runs every batch under every strategy and begins with another strategy
than the last, so that a busy neighbour disturbs all alike. A step does all that training does with learning rate 0, so
that the losses of all strategies must be equal. Documents are not deferred. Price: strategies · batches · (rounds + 1)
steps, and the data is read once for each strategy.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from evenload.bench.runs import (
    BatchRun,
    MachineLoad,
    RecordedBatch,
    StrategyRuns,
    pack_errors,
    recorded_batch,
    task_seconds,
)
from evenload.calibrate.fit import CoreWaits
from evenload.config.planner import run_planner
from evenload.cost.coefficients import CostCoefficients
from evenload.cost.pack_cost import PackCosts
from evenload.errors import ConfigError, DataError, InfeasiblePlanError
from evenload.explore.timelines import detailed_timeline, times_beside_transfers
from evenload.feed.step_maker import PlannedStep, StepMaker
from evenload.plan.planner import RunPlanner
from evenload.plan.strategies.strategy import LeftOutStrategy
from evenload.runtime.comm.mesh import most_of_ranks
from evenload.runtime.step_metrics import StepReport
from evenload.runtime.step_source import PreparedStep, prepare_step
from evenload.runtime.trainer import Trainer
from evenload.types.base import Frozen
from evenload.types.plan import StepPlan
from evenload.types.timeline import COUNTED_KINDS, MEMORY_KINDS


class Interleaved(Frozen):
    """What was measured, the machine's load meanwhile, and the batches that every strategy trained.

    Args:
        typical: of every strategy and batch the step of the round whose step time is in the middle.
    """

    runs: tuple[StrategyRuns, ...]
    left_out: tuple[LeftOutStrategy, ...]
    load: MachineLoad
    batches: tuple[RecordedBatch, ...]
    typical: dict[str, tuple[StepReport, ...]]


@dataclass
class _Measured:
    """Of one batch under one strategy, round after round."""

    reports: list[StepReport] = field(default_factory=list)

    def step_s(self) -> tuple[float, ...]:
        return tuple(report.measured.step_time_s for report in self.reports)

    def tasks_s(self) -> NDArray[np.float64]:
        """Return the seconds of tasks; float64[num_rounds, num_tasks]."""
        return np.array([task_seconds(report.measured) for report in self.reports])

    def peak_bytes(self) -> int:
        return max(int(report.row["peak_memory_bytes"] or 0) for report in self.reports)

    def typical(self) -> StepReport:
        """Return the step of the round in the middle; of two the slower one."""
        return sorted(self.reports, key=lambda report: report.measured.step_time_s)[len(self.reports) // 2]


def run_interleaved(
    trainer: Trainer,
    coefficients: CostCoefficients,
    memory_cap_bytes: int,
    strategies: Sequence[str],
    *,
    num_batches: int,
    num_rounds: int,
    demand: float,
    on_step: Callable[[], None],
) -> Interleaved | None:
    """Measure strategies against each other; the result on rank 0, None elsewhere. Collective.

    Args:
        trainer: whose weights are used and stay what they are; its optimizer's moments do not.
        memory_cap_bytes: of one process.
        num_batches: global batches; fewer where the data has fewer.
        num_rounds: that count, after one that does not.
        demand: threads that ranks compute with for each core of the machine.
        on_step: called after every step.

    Raises:
        ConfigError, DataError, InfeasiblePlanError: no strategy can run.
    """
    planned: dict[str, list[PlannedStep]] = {}
    left_out: list[LeftOutStrategy] = []
    for name in strategies:
        try:
            planned[name] = _planned(trainer, coefficients, memory_cap_bytes, name, num_batches)
        except (ConfigError, DataError, InfeasiblePlanError) as error:
            if len(left_out) == len(strategies) - 1:
                raise
            left_out.append(LeftOutStrategy(name=name, why=str(error)))
    measured: dict[tuple[str, int], _Measured] = {}
    waits = CoreWaits(demand)
    for turn, name, batch in _order(list(planned), len(next(iter(planned.values()))), num_rounds + 1):
        if turn == 1 and not measured:
            waits = CoreWaits(demand)  # the round that warms up does not count
        step, exchange = planned[name][batch], trainer.config.parallel.cp_exchange
        prepared = PreparedStep(step, prepare_step(step.plan, step.tokens, trainer.mesh, exchange))
        report = trainer.step_trainer.run(prepared, coefficients, learning_rate=0.0).report
        on_step()
        if report is None or turn == 0:
            continue
        measured.setdefault((name, batch), _Measured()).reports.append(report)
    waited_share = most_of_ranks(waits.share(), trainer.mesh)
    if trainer.mesh.rank != 0:
        return None
    runs = tuple(
        StrategyRuns(
            strategy=name,
            batches=tuple(
                _batch_run(trainer, batch, measured[name, batch], coefficients) for batch in range(len(steps))
            ),
        )
        for name, steps in planned.items()
    )
    first = next(iter(planned.values()))
    return Interleaved(
        runs=runs,
        left_out=tuple(left_out),
        load=MachineLoad(demand=demand, waited_share=waited_share),
        batches=tuple(recorded_batch(step.plan) for step in first),
        typical={
            name: tuple(measured[name, batch].typical() for batch in range(len(steps)))
            for name, steps in planned.items()
        },
    )


def _planned(
    trainer: Trainer,
    coefficients: CostCoefficients,
    memory_cap_bytes: int,
    strategy: str,
    num_batches: int,
) -> list[PlannedStep]:
    """The batches under one strategy, tokens at hand."""
    config, mesh = trainer.config, trainer.mesh
    config = msgspec.structs.replace(config, plan=msgspec.structs.replace(config.plan, strategy=strategy))
    planner = run_planner(config, trainer.model, mesh.layout, coefficients, memory_cap_bytes, mesh.ranks_per_machine)
    source = trainer.new_loader()
    try:
        maker = StepMaker(
            source,
            RunPlanner(planner, strategy, may_delay=False),
            replicas=lambda layout: layout.replicas(mesh.num_ranks),
            max_pack_tokens=config.max_pack_tokens,
            waiting=mesh.watch.waiting,
        )
        found: list[PlannedStep] = []
        while len(found) < num_batches and (step := maker.next()) is not None:
            found.append(step)
    finally:
        source.close()
    if not found:
        raise DataError("the data holds no document, so there is nothing to compare")
    return found


def _order(strategies: list[str], num_batches: int, num_rounds: int) -> Iterator[tuple[int, str, int]]:
    """(round, strategy, batch) of every step."""
    for turn in range(num_rounds):
        first = turn % len(strategies)
        for batch in range(num_batches):
            for name in (*strategies[first:], *strategies[:first]):
                yield turn, name, batch


def _predicted_peak_bytes(trainer: Trainer, plan: StepPlan, costs: PackCosts) -> int:
    """Of what is measured: on a GPU all, on a CPU what the activation stores count and what stays for the step."""
    if trainer.mesh.device.type == "cuda":
        return plan.predicted.peak_memory_bytes
    timeline = detailed_timeline(plan, costs)
    assert timeline.memory_kind_bytes is not None
    counted = [kind in COUNTED_KINDS for kind in MEMORY_KINDS]
    return int(timeline.memory_kind_bytes[:, counted].sum(axis=1).max())


def _batch_run(trainer: Trainer, batch: int, measured: _Measured, coefficients: CostCoefficients) -> BatchRun:
    report = measured.reports[-1]
    plan = report.plan
    costs = PackCosts(trainer.model, coefficients, plan.layout)
    return BatchRun(
        batch=batch,
        plan_digest=plan.digest,
        documents=len(plan.documents),
        tokens=sum(document.num_tokens for document in plan.documents),
        num_packs=max(len(packs.forward) for packs in plan.pack_plans),
        measured_s=measured.step_s(),
        predicted_s=plan.predicted.step_time_s,
        packs=pack_errors(times_beside_transfers(plan, costs), report.measured, measured.tasks_s()),
        measured_peak_bytes=measured.peak_bytes(),
        predicted_peak_bytes=_predicted_peak_bytes(trainer, plan, costs),
        loss=float(report.row["loss"] or 0.0),
    )
