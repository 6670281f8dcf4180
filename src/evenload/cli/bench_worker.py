"""What `evenload bench` runs in other processes: the checks in one, then the comparison in one per rank."""

from importlib.metadata import version
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from evenload.bench.interleaved import run_interleaved
from evenload.bench.runs import BenchInputs, BenchResult, loss_difference, option_tables_of
from evenload.cli.bench_report import bench_report
from evenload.cli.plan_strategies import chosen_strategies
from evenload.cli.start_checks import require_runnable
from evenload.cli.stop_request import StopLine
from evenload.cli.worker_setup import RankSetup, run_coefficients, started_rank
from evenload.cost.coefficients import CostCoefficients
from evenload.errors import ConfigError
from evenload.plan.problem.options import PlanOptions
from evenload.plan.strategies.best_fit import BEST_FIT
from evenload.plan.strategies.registry import require_layouts, require_trainable
from evenload.plan.strategies.strategy import LeftOutStrategy
from evenload.report.html import write_report
from evenload.runtime.config.run_planner import run_host
from evenload.runtime.config.train_config import TrainConfig, layout_of
from evenload.runtime.device import require_device
from evenload.runtime.model.configured import model_spec
from evenload.runtime.trainer import Trainer
from evenload.types.base import Frozen
from evenload.types.layout import ParallelLayout


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


def run_bench_worker(
    config: TrainConfig, plan: BenchPlan, cache: Path, answer: Path, page: Path | None, line: StopLine
) -> int:
    """One rank of a comparison; rank 0 leaves the result in a file. It ends at once when it is asked to stop.

    Args:
        cache: where calibrated cost files are kept between runs.
        page: where a report for people goes, too; None = there is none.
    """
    layout = layout_of(config, model_spec(config).num_layers)
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
                    host=run_host(config, layout, setup.mesh.ranks_per_machine),
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
