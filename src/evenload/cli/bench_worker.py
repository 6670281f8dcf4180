"""`evenload bench` in each of its processes: strategies in turns on the same batches, and the page that compares them
with their predictions.

A batch is run in several rounds; the timeline that is drawn is that of the round with the median step time.
"""

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import mean
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from evenload.bench.interleaved import run_interleaved
from evenload.bench.runs import BenchInputs, BenchResult, StrategyRuns, loss_difference, option_tables_of
from evenload.cli.plan_arguments import chosen_strategies
from evenload.cli.worker_setup import RankSetup, require_runnable, run_coefficients, started_rank
from evenload.config.planner import run_host
from evenload.config.train_config import TrainConfig, layout_of
from evenload.cost.coefficients import CostCoefficients
from evenload.cost.pack_cost import PackCosts
from evenload.errors import ConfigError
from evenload.explore.timelines import detailed_timeline, split_planned_step
from evenload.plan.problem import PlanOptions
from evenload.plan.strategies.baselines import BEST_FIT
from evenload.plan.strategies.registry import require_layouts, require_trainable
from evenload.plan.strategies.strategy import LeftOutStrategy
from evenload.report.html import write_report
from evenload.report.run_report import RunReport, RunSection, StepView
from evenload.report.units import format_change
from evenload.runtime.device import require_device
from evenload.runtime.model.configured import model_spec
from evenload.runtime.step_metrics import StepReport
from evenload.runtime.trainer import Trainer
from evenload.types.base import Frozen
from evenload.types.layout import ParallelLayout
from evenload.types.timeline import mean_time_split


def bench_report(result: BenchResult, typical: Mapping[str, Sequence[StepReport]]) -> RunReport:
    """What was measured as a page.

    Args:
        typical: of every strategy a step for each batch.
    """
    costs = PackCosts(result.inputs.model, result.coefficients, result.inputs.layout)
    rows = [_row(one, typical[one.strategy]) for one in result.runs]
    return RunReport(
        title=f"Evenload bench: {', '.join(one.strategy for one in result.runs)} on the same batches",
        headline=f"Measured: {result.outcome}",
        facts=result.facts,
        sections=tuple(_section(one, typical[one.strategy], costs, result) for one in result.runs),
        comparison=(*rows, *({"name": one.name, "feasible": False, "why": one.why} for one in result.left_out)),
        best=result.winner,
    )


def _section(one: StrategyRuns, steps: Sequence[StepReport], costs: PackCosts, result: BenchResult) -> RunSection:
    views = (
        StepView(
            step=step.plan.step, predicted=detailed_timeline(step.plan, costs), measured=step.measured, plan=step.plan
        )
        for step in steps
    )
    busy = "" if result.held_to_interval()[1] else ", on a machine too busy to hold predictions against it"
    return RunSection(
        name=one.strategy,
        steps=tuple(views),
        time_split=mean_time_split([split_planned_step(step.plan, costs) for step in steps]),
        memory_limit_bytes=result.inputs.memory_cap_bytes,
        notes=(f"the predicted step time differs from the measured one by {format_change(one.error)}{busy}",),
    )


def _row(one: StrategyRuns, steps: Sequence[StepReport]) -> dict[str, Any]:
    """Of the comparison: step times are means over the batches, of medians over the rounds."""
    return {
        "name": one.strategy,
        "feasible": True,
        "measured_step_time_s": one.measured_s,
        "mean_step_time_s": one.predicted_s,
        "measured_tokens_per_s": one.tokens_per_s,
        **{
            key: mean(float(step.row[key] or 0) for step in steps)
            for key in ("bubble_fraction", "imbalance_forward", "imbalance_backward", "imbalance_dp")
        },
        "peak_memory_bytes": max(run.measured_peak_bytes for run in one.batches),
        "layout": steps[0].row["layout"],
    }


class BenchPlan(Frozen):
    """What to compare: so many batches, so many rounds that count.

    Args:
        left_out: strategies that are not tried though all were asked for.
    """

    strategies: tuple[str, ...]
    left_out: tuple[LeftOutStrategy, ...]
    num_batches: int
    num_rounds: int


def checked_bench(
    config: TrainConfig, asked: tuple[str, ...] | None, num_batches: int, num_rounds: int
) -> tuple[BenchPlan, ParallelLayout]:
    """A comparison whose settings go together, and the layout it runs in.

    Args:
        asked: names; None = all that train.

    Raises:
        ConfigError, UnsupportedModelError: as `require_runnable`, for every strategy.
    """
    # Options that only one of the strategies reads may be set: all are compared under one set of options.
    shared = PlanOptions(schedule=config.plan.options.schedule)
    first = asked[0] if asked is not None else BEST_FIT.name
    plan = msgspec.structs.replace(config.plan, strategy=first, options=shared, layouts=())
    layout = require_runnable(msgspec.structs.replace(config, plan=plan))
    require_device(config.train.device, layout.world_size)
    names: list[str] = []
    chosen, left_out = chosen_strategies(asked, layout, config.plan.options)
    for name in chosen:
        try:
            require_layouts(name, layout, 1)
            require_trainable(name, layout, shared)
            names.append(name)
        except ConfigError as error:
            if asked is not None:
                raise
            left_out += (LeftOutStrategy(name=name, why=str(error)),)
    plan = BenchPlan(strategies=tuple(names), left_out=left_out, num_batches=num_batches, num_rounds=num_rounds)
    return plan, layout


def run_bench_worker(config: TrainConfig, plan: BenchPlan, cache: Path, answer: Path, page: Path | None) -> int:
    """One rank of a comparison; rank 0 leaves the result in a file. It ends at once when it is asked to stop.

    Args:
        cache: where calibrated cost files are kept between runs.
        page: where a report for people goes, too; None = there is none.
    """
    layout = layout_of(config.parallel, model_spec(config).num_layers)
    with started_rank(config, layout) as setup:
        console = Console(stderr=True, quiet=setup.mesh.rank != 0, highlight=False)
        trainer = Trainer(config, setup.mesh)
        # Every step is measured by itself, gathering its weights included: no other step is known to follow.
        costs = msgspec.structs.replace(run_coefficients(trainer, cache, setup.threads, console), overlap_gather=False)
        facts = _facts(config, trainer, costs, setup)
        console.print(" | ".join(f"{key} {value}" for key, value in facts), soft_wrap=True)
        num_steps = len(plan.strategies) * plan.num_batches * (plan.num_rounds + 1)
        columns = (TextColumn("steps"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
            task = progress.add_task("steps", total=num_steps)
            found = run_interleaved(
                trainer,
                costs,
                setup.memory_cap_bytes,
                plan.strategies,
                num_batches=plan.num_batches,
                num_rounds=plan.num_rounds,
                demand=setup.demand,
                on_step=lambda: progress.advance(task),
            )
        if found is not None:
            options = msgspec.structs.replace(config.plan.options, max_pack_tokens=config.max_pack_tokens)
            result = BenchResult(
                facts=facts,
                runs=found.runs,
                left_out=plan.left_out + found.left_out,
                loss_difference=loss_difference(found.runs),
                load=found.load,
                coefficients=costs,
                inputs=BenchInputs(
                    model=trainer.model,
                    layout=layout,
                    options=option_tables_of(options),
                    memory_cap_bytes=setup.memory_cap_bytes,
                    batches=found.batches,
                    host=run_host(config.plan, setup.mesh.ranks_per_machine),
                ),
            )
            answer.write_bytes(msgspec.json.encode(result))
            if page is not None:
                write_report(page, bench_report(result, found.typical))
    return 0


def _facts(
    config: TrainConfig, trainer: Trainer, costs: CostCoefficients, setup: RankSetup
) -> tuple[tuple[str, str], ...]:
    model = trainer.model
    return (
        ("model", f"{model.name} ({config.model.dtype})"),
        ("parameters", f"{model.num_parameters / 1e6:.1f} M"),
        ("layout", setup.mesh.layout.describe()),
        ("device", costs.device),
        ("costs", costs.source),
        ("tokenizer", trainer.tokenizer_fact),
        ("versions", f"evenload {version('evenload')}, torch {version('torch')}"),
    )
