"""`evenload plan --engine`: what the plans take on someone else's engine, beside Evenload's own runtime."""

from collections.abc import Sequence
from typing import Any

import msgspec

from evenload.cli.plan_inputs import PlanInputs
from evenload.cli.progress_bar import progress_bar
from evenload.explore.evaluate import Evaluation
from evenload.explore.sampled_batches import SampledBatch
from evenload.integrations.catalog import engine_named
from evenload.integrations.engine_profile import BEST, EngineProfile, require_heads, require_strategy
from evenload.integrations.evaluate import EngineEvaluation, evaluate_engine
from evenload.integrations.planner import EnginePlanner
from evenload.integrations.projection import StepShape
from evenload.report.units import format_seconds
from evenload.types.counted import counted
from evenload.types.layout import ParallelLayout, even_layout
from evenload.types.length_unit import LengthUnit, in_unit


def engine_layout(inputs: PlanInputs, engine: str) -> ParallelLayout | None:
    """The layout that is planned in where none is given: data parallel on an engine without a pipeline."""
    if inputs.layout is not None or engine_named(engine).schedules:
        return inputs.layout
    return even_layout(inputs.costs.model.num_layers, dp=inputs.machines.num_devices)


def require_engine(engine: str, inputs: PlanInputs, strategies: tuple[str, ...] | None, layout: ParallelLayout) -> None:
    """Refuse, before anything is planned, a layout or a strategy named that the engine cannot run."""
    for name in strategies or (BEST,):
        require_strategy(engine_named(engine), name, inputs.options, layout)
    require_heads(engine_named(engine), inputs.costs.model, layout)


def engine_evaluation(
    engine: str,
    inputs: PlanInputs,
    layout: ParallelLayout,
    batches: Sequence[SampledBatch],
    strategies: tuple[str, ...] | None,
) -> EngineEvaluation:
    """Every strategy that was asked for, on the engine."""
    profile, costs = engine_named(engine), inputs.costs
    shape = _shape(profile, inputs, layout)
    planner = EnginePlanner(profile, costs.model, costs.of(layout), layout, inputs.options, shape)
    with progress_bar() as on_progress:
        return evaluate_engine(planner, batches, strategies, on_progress=on_progress)


def engine_lines(found: EngineEvaluation, own: Evaluation, unit: LengthUnit) -> tuple[str, ...]:
    """What the engine's table does not say: the assumptions, the best of both, and what was left out."""
    lines = [
        f"{found.engine}: predicted from the cost model of Evenload's runtime and the engine's order, padding and "
        "waiting; not measured on GPUs, its memory is not predicted (docs/engines.md)"
    ]
    lines += [
        f"{found.engine}: Evenload's adapter does not run these plans: {one.why}. {one.instead}"
        for one in found.not_adapted
    ]
    by_name = {result.name: result for result in found.results}
    if found.best:
        best = by_name[found.best]
        line = f"{found.engine}: fastest {found.best}"
        line += f" (as {best.planned_by})" if best.planned_by else ""
        line += f", {format_seconds(best.mean_step_time_s or 0.0)} a step"
        if best.micro_batches_per_rank is not None:
            line += f", {counted(best.micro_batches_per_rank, 'micro-batch')} on every rank in every step"
        ours = next((result for result in own.results if result.name == own.best), None)
        if ours is not None and ours.mean_step_time_s is not None:
            line += f"; Evenload's own runtime: {ours.name}, {format_seconds(ours.mean_step_time_s)}"
        lines.append(line)
    lines += [f"left out on {found.engine}: {one.name}: {one.why}" for one in found.left_out]
    return tuple(in_unit(line, unit) for line in lines)


def engine_content(found: EngineEvaluation) -> dict[str, Any]:
    """`engine` of `--json`."""
    return {
        "name": found.engine,
        "title": found.title,
        "strategies": [msgspec.to_builtins(result) for result in found.results],
        "best": found.best or None,
        "left_out": [msgspec.to_builtins(one) for one in found.left_out],
        "not_adapted": [msgspec.to_builtins(one) for one in found.not_adapted],
    }


def _shape(profile: EngineProfile, inputs: PlanInputs, layout: ParallelLayout) -> StepShape:
    """As `PackedLoader` makes a step's micro-batches for the engine."""
    options = inputs.options
    return StepShape(
        micro_batches=options.micro_batches if profile.is_constant_in(layout) else None,
        pack_tokens=options.max_pack_tokens if profile.pads_in(layout) else None,
    )
