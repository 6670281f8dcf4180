"""What `evenload bench`, `check` and `profile` run in other processes: checks of the request in one (`*_task`), then
the measurement in one per rank (`*_rank`), of which rank 0 writes the answer as JSON."""

import functools
import os
from collections.abc import Sequence
from importlib.metadata import version
from itertools import count
from pathlib import Path
from statistics import mean
from typing import Any

import msgspec
import torch
from transformers import PretrainedConfig

from evenload.attention.backends import select_backend
from evenload.bench.interleaved import run_interleaved
from evenload.bench.results import BenchInputs, BenchResult, StrategyRuns, loss_difference, option_tables_of
from evenload.calibrate.profile import ProfileTask, profile
from evenload.check.checks import run_checks
from evenload.check.smaller_run import smaller_run
from evenload.cli.comparison import step_view
from evenload.cli.measure import BenchRequest, ProfileRequest
from evenload.cli.options import print_lines, progress_bar
from evenload.cli.plan_request import chosen_strategies
from evenload.cli.worker_setup import (
    RankSetup,
    device_name,
    joined_rank,
    memory_for_rank,
    require_runnable,
    run_coefficients,
    started_rank,
)
from evenload.config.planner import host_memory_of_run
from evenload.config.sections import RunConfig, liger_refusal
from evenload.config.tokenizer import run_tokenizer_text, tokenizer_warnings
from evenload.config.train_config import BYTES_PER_ELEMENT, TrainConfig, layout_of
from evenload.cost.coefficients import CostCoefficients
from evenload.cost.pack_cost import PackCosts
from evenload.data.config import shares_prefixes
from evenload.data.hub import model_from
from evenload.data.tokenize import open_tokenizer
from evenload.errors import ConfigError
from evenload.explore.timelines import split_step_of_plan
from evenload.planning.problem import PlanOptions
from evenload.planning.strategies.baselines import BEST_FIT
from evenload.planning.strategies.registry import require_layouts, require_trainable
from evenload.planning.strategies.strategy import LeftOutStrategy
from evenload.report.html import write_report
from evenload.report.run_report import RunReport, RunSection
from evenload.runtime.device import require_device, resident_bytes
from evenload.runtime.model.hf_model import build_rank_models, build_stage_model, require_layout
from evenload.runtime.model.model_config import (
    load_config,
    model_spec,
    position_warning,
    proof_line,
    spec_of,
    with_few_layers,
)
from evenload.runtime.optim.data_parallel import flatten_units
from evenload.runtime.replay.stage import PipelineStage
from evenload.runtime.step_metrics import StepReport
from evenload.runtime.trainer import Trainer
from evenload.types.layout import ParallelLayout, even_layout, read_layout_text
from evenload.types.model import ModelSpec
from evenload.types.text import counted, format_bytes, format_change
from evenload.types.timeline import mean_time_split


def bench_task(
    answer: Path, request: BenchRequest, config: TrainConfig, names: tuple[str, ...] | None, cache: Path
) -> tuple[tuple, int]:
    """Check a comparison as `require_runnable`, for every strategy; `names` None = all that train."""
    # Options that only one of the strategies reads may be set: all are compared under one set of options.
    shared = PlanOptions(schedule=config.plan.options.schedule)
    first = names[0] if names is not None else BEST_FIT.name
    plan = msgspec.structs.replace(config.plan, strategy=first, options=shared, layouts=())
    layout = require_runnable(msgspec.structs.replace(config, plan=plan))
    require_device(config.train.device, layout.world_size)
    trainable: list[str] = []
    chosen, left_out = chosen_strategies(names, layout, config.plan.options)
    has_trees = shares_prefixes(config.data)
    for name in chosen:
        try:
            require_layouts(name, layout, 1)
            require_trainable(name, layout, shared, has_trees=has_trees)
            trainable.append(name)
        except ConfigError as error:
            if names is not None:
                raise
            left_out += (LeftOutStrategy(name=name, why=str(error)),)
    return (answer, request, config, tuple(trainable), left_out, cache), layout.world_size


def bench_rank(
    answer: Path,
    request: BenchRequest,
    config: TrainConfig,
    strategies: tuple[str, ...],
    left_out: tuple[LeftOutStrategy, ...],
    cache: Path,
) -> int:
    """Run one rank of a comparison; the answer is a `BenchResult`."""
    layout = layout_of(config.parallel, model_spec(config).num_layers)
    with started_rank(config, layout) as setup:
        trainer = Trainer(config, setup.mesh)
        # Every step is measured by itself, gathering its weights included: no other step is known to follow.
        costs = run_coefficients(trainer, cache, setup)
        costs = msgspec.structs.replace(costs, overlap_gather=False)
        facts = (
            ("model", f"{trainer.model.name} ({config.model.dtype})"),
            ("parameters", f"{trainer.model.num_parameters / 1e6:.1f} M"),
            ("layout", layout.describe()),
            ("device", costs.device),
            ("costs", costs.source),
            ("tokenizer", trainer.run_tokenizer_text),
            ("versions", f"evenload {version('evenload')}, torch {version('torch')}"),
        )
        print_lines(setup.console, " | ".join(f"{key} {value}" for key, value in facts))
        num_steps = len(strategies) * request.steps * (request.rounds + 1)
        done = count(1)
        with progress_bar(setup.console) as move:
            measured = run_interleaved(
                trainer,
                costs,
                setup.memory_cap_bytes,
                strategies,
                num_batches=request.steps,
                num_rounds=request.rounds,
                demand=setup.demand,
                on_step=lambda: move(next(done), num_steps, "steps"),
            )
        if measured is None:  # on other ranks than 0
            return 0
        options = msgspec.structs.replace(config.plan.options, max_pack_tokens=config.max_pack_tokens)
        result = BenchResult(
            facts=facts,
            runs=measured.runs,
            left_out=left_out + measured.left_out,
            loss_difference=loss_difference(measured.runs),
            load=measured.load,
            coefficients=costs,
            inputs=BenchInputs(
                model=trainer.model,
                layout=layout,
                options=option_tables_of(options),
                memory_cap_bytes=setup.memory_cap_bytes,
                batches=measured.batches,
                host=host_memory_of_run(config.plan, setup.mesh.ranks_per_machine),
            ),
        )
        answer.write_bytes(msgspec.json.encode(result))
        if request.html_path is not None:
            pack_costs = PackCosts(trainer.model, costs, layout)
            parts = [_bench_section(one, measured.typical[one.strategy], pack_costs, result) for one in result.runs]
            sections, rows = zip(*parts, strict=True)
            others = ({"name": one.name, "feasible": False, "why": one.why} for one in result.left_out)
            report = RunReport(
                title=f"Evenload bench: {', '.join(strategies)} on the same batches",
                headline=f"Measured: {result.outcome}.",
                facts=facts,
                sections=sections,
                comparison=(*rows, *others),
                best=(result.winner,) if result.winner else (),
            )
            write_report(request.html_path, report)
    return 0


def _bench_section(
    one: StrategyRuns, steps: Sequence[StepReport], costs: PackCosts, result: BenchResult
) -> tuple[RunSection, dict[str, Any]]:
    """Return a strategy's section of the page and its row of the comparison; `steps` has a typical one per batch."""
    busy = "" if result.compare_with_interval()[1] else ", on a machine too busy to hold predictions against it"
    section = RunSection(
        name=one.strategy,
        steps=tuple(step_view(step.plan, costs, step.measured) for step in steps),
        time_split=mean_time_split([split_step_of_plan(step.plan, costs) for step in steps]),
        memory_limit_bytes=result.inputs.memory_cap_bytes,
        notes=(f"the predicted step time differs from the measured one by {format_change(one.error)}{busy}",),
    )
    row: dict[str, Any] = {
        "name": one.strategy,
        "feasible": True,
        "measured_step_time_s": one.measured_s,
        "mean_step_time_s": one.predicted_s,
        "measured_tokens_per_s": one.tokens_per_s,
        "peak_memory_bytes": max(run.measured_peak_bytes for run in one.batches),
        "layout": steps[0].row["layout"],
    }
    for key in ("bubble_fraction", "imbalance_forward", "imbalance_backward", "imbalance_dp"):
        row[key] = mean(float(step.row[key] or 0) for step in steps)
    return section, row


def check_task(answer: Path, config: TrainConfig, cache: Path) -> tuple[tuple, int]:
    """Check that a run can be checked, and choose a smaller one, which lies beside the answer."""
    config = config.with_found_kinds()
    require_runnable(config)
    smaller, notes = smaller_run(config, answer.parent)
    layout = layout_of(smaller.parallel, model_spec(smaller).num_layers)
    require_device(smaller.train.device, layout.world_size)
    less = f"; smaller than your run: {', '.join(notes)}" if notes else ""
    tokenizer = open_tokenizer(config.data.tokenizer, config.data.eos_token)
    warnings = (
        position_warning(load_config(config.model.path), config.data.max_document_tokens),
        *tokenizer_warnings(config.data, tokenizer, config.model.path),
    )
    lines = (
        f"checking {config.model.path} on layout {layout.describe()}{less}",
        proof_line(load_config(config.model.path)),
        f"tokenizer {run_tokenizer_text(config.data, tokenizer, model_spec(config).vocab_size)}",
        *(f"evenload: warning: {warning}" for warning in warnings if warning),
    )
    return (answer, config, smaller, lines, cache), layout.world_size


def check_rank(answer: Path, config: TrainConfig, smaller: TrainConfig, lines: tuple[str, ...], cache: Path) -> int:
    """Run one rank of the checks, after lines that say what is checked; the answer is a list of `Verdict`."""
    users_layout = layout_of(config.parallel, model_spec(config).num_layers)
    with started_rank(smaller, layout_of(smaller.parallel, model_spec(smaller).num_layers)) as setup:
        print_lines(setup.console, *lines)
        users_cap_bytes = config.plan.memory_bytes or memory_for_rank(setup.mesh.device, users_layout.world_size)
        trainer = Trainer(smaller, setup.mesh)
        longest = config.data.max_document_tokens
        costs = run_coefficients(trainer, cache, setup, longest)
        del trainer
        caps = setup.memory_cap_bytes, users_cap_bytes
        on_start = functools.partial(setup.console.print, "checking")
        verdicts = run_checks(config, smaller, setup.mesh, costs, *caps, on_start)
        if setup.mesh.rank == 0:
            answer.write_bytes(msgspec.json.encode(verdicts))
    return 0


def _resolved(request: ProfileRequest) -> tuple[PretrainedConfig, ModelSpec, ParallelLayout]:
    """Return the model, and the layout, in which sizes that are not named are 1."""
    config = load_config(request.model)
    model = spec_of(config, model_from(request.model).name, BYTES_PER_ELEMENT[request.precision])
    return config, model, read_layout_text(request.layout or "dp=1").layout(model.num_layers)


def profile_task(answer: Path, request: ProfileRequest) -> tuple[tuple[Path, ProfileRequest], int]:
    """Check options that go together: a model that is trained, in a layout that it and this machine can have."""
    config, _, layout = _resolved(request)
    require_layout(config, layout)
    require_device(request.device, int(os.environ.get("LOCAL_WORLD_SIZE", layout.world_size)))
    if request.device == "cpu":  # a GPU's kernels are checked on the GPU
        select_backend(request.attention, "cpu")
    return (answer, request), layout.world_size


def profile_rank(answer: Path, request: ProfileRequest) -> int:
    """Run one rank of a profile; the answer is `CostCoefficients`."""
    config, model, layout = _resolved(request)
    run = RunConfig(output_dir="", device=request.device, threads_per_process=request.threads)
    with joined_rank(run, (layout,)) as setup:
        costs = _profiled(request, config, model, setup)
        if setup.mesh.rank == 0:
            answer.write_bytes(msgspec.json.encode(costs))
    return 0


def _profiled(
    request: ProfileRequest, config: PretrainedConfig, model: ModelSpec, setup: RankSetup
) -> CostCoefficients:
    mesh, device = setup.mesh, setup.mesh.device
    dtype: torch.dtype = getattr(torch, request.precision)
    before_bytes = resident_bytes() or 0
    few = _few_layers(config, model, setup)
    timed = spec_of(few, model.name, model.bytes_per_element)
    sizes = {axis: getattr(mesh.layout, axis) for axis in ("dp", "cp", "pp", "tp")}
    layout = even_layout(timed.num_layers, virtual=mesh.layout.num_stages // mesh.layout.pp, **sizes)
    build = functools.partial(build_stage_model, dtype=dtype, device=device, weights=None, seed=0, tp_rank=mesh.tp_rank)
    models = build_rank_models(layout, mesh.pp_rank, functools.partial(build, few))
    if not liger_refusal(request.device, request.precision):
        for part in models.values():
            part.use_liger(layout.tp)
    buffers = flatten_units(tuple(models.values()), mesh.data_size)
    backend = select_backend(request.attention, device.type, dtype=dtype, head_dim=model.head_dim)
    stages = {index: PipelineStage(part, backend, mesh.tensor) for index, part in models.items()}
    static_bytes = sum(buffer.values.nbytes + buffer.grads.nbytes for buffer in buffers)
    task = ProfileTask(
        model=model,
        timed=timed,
        layers=len(stages[min(stages)].model.layers),
        device_name=device_name(device, setup.threads),
        dtype=request.precision,
        longest=request.longest,
        budget_s=request.minutes * 60,
        free_bytes=max(0, setup.memory_cap_bytes - static_bytes),
        before_bytes=before_bytes,
        static_bytes=static_bytes,
        demand=setup.demand,
        versions={"evenload": version("evenload"), "torch": version("torch")},
    )
    described = task.describe(mesh, stages[min(stages)])
    print_lines(setup.console, f"profiling {described}: at most about {request.minutes:g} min (--minutes)")
    say = functools.partial(print_lines, setup.console)
    with progress_bar(setup.console) as move:
        return profile(stages, task, mesh, say=say, on_pass=lambda done, total: move(done, total, "passes"))


def _few_layers(config: PretrainedConfig, model: ModelSpec, setup: RankSetup) -> PretrainedConfig:
    """Return a configuration with as many layers as memory allows, up to four a stage: more say nothing new, fewer fit
    caches that a model's do not. Raises `ConfigError`: not even one layer of each kind fits."""
    tp, stages = setup.mesh.layout.tp, setup.mesh.layout.num_stages
    per_rank = stages // setup.mesh.layout.pp
    element_bytes = model.bytes_per_element + max(4, model.bytes_per_element)
    layer_bytes = per_rank * element_bytes * max(kind.parameters for kind in model.kinds) // tp
    # The first stage has the embedding, the last the head; on one rank both, or one that is tied.
    outer = (2 if stages == per_rank and not model.tied_embeddings else 1) * model.embedding_parameters
    outer_bytes = element_bytes * outer // tp
    usable_bytes = int(0.35 * setup.memory_cap_bytes)  # what weights and gradients may take
    needed = len(model.kinds)
    if usable_bytes - outer_bytes < needed * layer_bytes:
        raise ConfigError(
            f"{counted(needed, 'layer')} of {model.name} a stage and its embedding take "
            f"{format_bytes(needed * layer_bytes + outer_bytes)} with their gradients, and a process may use "
            f"{format_bytes(usable_bytes)} for them; split matrices with --layout tp=..., or use more memory"
        )
    return with_few_layers(config, model.layers, stages, min(4, (usable_bytes - outer_bytes) // layer_bytes))
