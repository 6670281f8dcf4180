"""Run the same global batches under several strategies, interleaved step by step in one set of processes.

After a round that warms up, rounds count. A round runs every batch under every strategy and begins with another
strategy than the last, so that a busy neighbour disturbs all alike. A step does all that training does with learning
rate 0, so that the losses of all strategies must be equal. Documents are not deferred. Price: strategies · batches ·
(rounds + 1) steps, and the data is read once for each strategy.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing

import msgspec
import numpy as np

from evenload.bench.results import BatchRun, MachineLoad, RecordedBatch, StrategyRuns, pack_errors, recorded_batch
from evenload.calibrate.fit import CoreWaits
from evenload.config.planner import make_planner
from evenload.cost.coefficients import CostCoefficients
from evenload.cost.pack_cost import PackCosts
from evenload.errors import ConfigError, DataError, InfeasiblePlanError
from evenload.explore.timelines import detailed_timeline, overlapped_pack_times
from evenload.feed.step_maker import PlannedStep
from evenload.planning.planner import RunPlanner
from evenload.planning.strategies.strategy import LeftOutStrategy
from evenload.runtime.comm.mesh import most_of_ranks
from evenload.runtime.step_metrics import StepReport
from evenload.runtime.step_source import prepared_step, step_maker
from evenload.runtime.trainer import Trainer
from evenload.types.base import Frozen
from evenload.types.plan import StepPlan
from evenload.types.timeline import COUNTED_KINDS, MEMORY_KINDS


class Interleaved(Frozen):
    """What was measured, the machine's load meanwhile, and the batches that every strategy trained.

    Args:
        typical: by strategy, of every batch the step of the round with the median step time; of two the slower one.
    """

    runs: tuple[StrategyRuns, ...]
    left_out: tuple[LeftOutStrategy, ...]
    load: MachineLoad
    batches: tuple[RecordedBatch, ...]
    typical: dict[str, tuple[StepReport, ...]]


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
        num_batches: fewer where the data has fewer; num_rounds: that count, after one that does not.
        demand: threads that ranks compute with for each core of the machine.

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
    measured: dict[tuple[str, int], list[StepReport]] = {}
    waits = CoreWaits(demand)
    for turn, name, batch in _order(list(planned), len(next(iter(planned.values()))), num_rounds + 1):
        if turn == 1 and not measured:
            waits = CoreWaits(demand)  # the round that warms up does not count
        step, exchange = planned[name][batch], trainer.config.parallel.cp_exchange
        prepared = prepared_step(step, trainer.meshes, exchange)
        report = trainer.step_trainer.run(prepared, coefficients, learning_rate=0.0).report
        on_step()
        if report is not None and turn:
            measured.setdefault((name, batch), []).append(report)
    waited_share = most_of_ranks(waits.share(), trainer.mesh)
    if trainer.mesh.rank != 0:
        return None
    batches = range(len(next(iter(planned.values()))))
    runs, typical = [], {}
    for name in planned:
        reports = [sorted(measured[name, batch], key=lambda one: one.measured.step_time_s) for batch in batches]
        typical[name] = tuple(of_batch[len(of_batch) // 2] for of_batch in reports)
        of_batches = (_batch_run(trainer, batch, measured[name, batch], coefficients) for batch in batches)
        runs.append(StrategyRuns(strategy=name, batches=tuple(of_batches)))
    return Interleaved(
        runs=tuple(runs),
        left_out=tuple(left_out),
        load=MachineLoad(demand=demand, waited_share=waited_share),
        batches=tuple(recorded_batch(step.plan) for step in next(iter(planned.values()))),
        typical=typical,
    )


def _planned(
    trainer: Trainer, coefficients: CostCoefficients, memory_cap_bytes: int, strategy: str, num_batches: int
) -> list[PlannedStep]:
    config, mesh = trainer.config, trainer.mesh
    config = msgspec.structs.replace(config, plan=msgspec.structs.replace(config.plan, strategy=strategy))
    planner = make_planner(config, trainer.model, mesh.layout, coefficients, memory_cap_bytes, mesh.ranks_per_machine)
    with closing(trainer.new_loader()) as source:
        maker = step_maker(source, RunPlanner(planner, strategy, may_delay=False), mesh, config.max_pack_tokens)
        steps: list[PlannedStep] = []
        while len(steps) < num_batches and (step := maker.next()) is not None:
            steps.append(step)
    if not steps:
        raise DataError("the data holds no document, so there is nothing to compare")
    return steps


def _order(strategies: list[str], num_batches: int, num_rounds: int) -> Iterator[tuple[int, str, int]]:
    """Yield (round, strategy, batch) of every step."""
    for turn in range(num_rounds):
        first = turn % len(strategies)
        for batch in range(num_batches):
            for name in (*strategies[first:], *strategies[:first]):
                yield turn, name, batch


def _batch_run(trainer: Trainer, batch: int, reports: Sequence[StepReport], coefficients: CostCoefficients) -> BatchRun:
    report, plan = reports[-1], reports[-1].plan
    costs = PackCosts(trainer.model, coefficients, plan.layout)
    rounds_s = np.array([one.measured.end_s - one.measured.start_s for one in reports])  # tasks are in one order
    return BatchRun(
        batch=batch,
        plan_digest=plan.digest,
        documents=len(plan.documents),
        tokens=sum(document.num_tokens for document in plan.documents),
        num_packs=max(len(packs.forward) for packs in plan.pack_plans),
        measured_s=tuple(one.measured.step_time_s for one in reports),
        predicted_s=plan.predicted.step_time_s,
        packs=pack_errors(overlapped_pack_times(plan, costs), report.measured, rounds_s),
        measured_peak_bytes=max(int(one.row["peak_memory_bytes"] or 0) for one in reports),
        predicted_peak_bytes=_predicted_peak_bytes(trainer, plan, costs),
        loss=float(report.row["loss"] or 0.0),
    )


def _predicted_peak_bytes(trainer: Trainer, plan: StepPlan, costs: PackCosts) -> int:
    """Predict what is measured: on a GPU all, on a CPU what activation stores count and what stays for the step."""
    if trainer.mesh.device.type == "cuda":
        return plan.predicted.peak_memory_bytes
    timeline = detailed_timeline(plan, costs)
    assert timeline.memory_kind_bytes is not None
    counted = [kind in COUNTED_KINDS for kind in MEMORY_KINDS]
    return int(timeline.memory_kind_bytes[:, counted].sum(axis=1).max())
