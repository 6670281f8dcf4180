"""`evenload plan --lengths-per-step`: what the recorded steps of any trainer lost to waiting, and what they would take
as `evenload.micro_batches` divides them."""

from dataclasses import fields, replace
from importlib.metadata import version

import msgspec
from rich.console import Console

from evenload.cli.options import indented_json, print_lines, progress_bar, shown_name, write_output
from evenload.cli.plan_inputs import PlanInputs, plan_inputs
from evenload.cli.plan_request import PlanRequest, length_source
from evenload.cost.pack_cost import PackCosts
from evenload.errors import ConfigError
from evenload.explore.recorded_steps import fitted_cost, judge_steps, read_steps
from evenload.integrations.catalog import EngineProfile, engine_named, require_heads, require_layout
from evenload.report.divisions import divisions_page
from evenload.report.units import format_percent, format_seconds
from evenload.types.cluster import cluster_of
from evenload.types.division import JudgedSteps, Waits
from evenload.types.layout import ParallelLayout, read_layout_text
from evenload.types.text import counted

_TAKEN = ("lengths_per_step", "model", "cluster", "layout", "context", "engine", "cost", "json_file", "html")


def judge_recorded_steps(request: PlanRequest, file: str, console: Console) -> None:
    """Print what is predicted of the steps in `file`, and write it as JSON and as a page where these are asked for."""
    _require_compatible(request)
    profile = engine_named(request.engine) if request.engine else None
    context = request.tokens_of("context")
    steps = read_steps(file, context, equal_counts=profile is None or profile.equal_counts)
    if not (limit := context or max(one.largest_tokens for one in steps)):
        raise ConfigError(f"--context is missing, the most tokens of a micro-batch, and {file} has no micro_batches")
    inputs, layout = _inputs(request, file, steps[0].ranks)
    if profile:
        _require_engine(profile, inputs, layout)
    waits: Waits = "micro_batch" if profile is None or profile.waits_in(layout) else "step"
    coefficients = inputs.costs.of(layout)
    costs = PackCosts(inputs.costs.model, coefficients, layout)
    cost = fitted_cost(costs, steps)
    with progress_bar() as on_progress:
        judged = judge_steps(steps, costs, cost, limit, waits, on_progress)
    call = f"evenload.micro_batches(lengths, {layout.dp}, {limit}, waits={waits!r}, cost=evenload.{cost})"
    at = "at every micro-batch" if waits == "micro_batch" else "once a step"
    shown: dict[str, str | int] = {
        "lengths_per_step": shown_name(file),
        "steps": len(steps),
        "documents": sum(one.documents for one in judged.steps),
        "tokens": sum(one.tokens for one in judged.steps),
        "model": inputs.model_name,
        "cluster": inputs.cluster.name,
        "costs": coefficients.source,
        "layout": layout.describe(),
        "ranks_wait": f"{at} ({f'engine {profile.name}' if profile else 'no --engine named'})",
        "max_tokens": limit,
        "max_tokens_from": "--context" if context else "the largest micro-batch",
    }
    messages = [f"cost: {message}" for message in inputs.costs.messages(layout)]
    facts = [(name.replace("_", " "), f"{one:,}" if isinstance(one, int) else one) for name, one in shown.items()]
    print_lines(
        console, _headline(judged), ", ".join(map(" ".join, facts)), *_remarks(judged), *messages, f"ours: {call}"
    )
    if request.json_file:
        content = {"version": version("evenload"), "headline": _headline(judged), "inputs": shown, "call": call}
        write_output(request.json_file, indented_json(content | msgspec.to_builtins(judged)))
    if request.html:
        page = divisions_page(
            f"Steps of {shown['lengths_per_step']}", _headline(judged), judged, [*facts, ("ours", call)]
        )
        write_output(request.html, page.encode())


def _require_compatible(request: PlanRequest) -> None:
    if request.lengths is not None:
        raise ConfigError(f"LENGTHS {request.lengths} and --lengths-per-step exclude each other; give one")
    others = [one for one in fields(request) if one.name not in _TAKEN and getattr(request, one.name) != one.default]
    if others:
        names = (next(iter(one.metadata["typer"].param_decls), f"--{one.name.replace('_', '-')}") for one in others)
        raise ConfigError(f"--lengths-per-step judges steps as they are: leave out {', '.join(names)}")


def _inputs(request: PlanRequest, file: str, ranks: int) -> tuple[PlanInputs, ParallelLayout]:
    """Return what steps are priced for: the ranks of the file's partitions (0 = it has none), on H100s unless a cluster
    is named."""
    if not (request.layout or ranks):
        raise ConfigError(f"--layout dp=N is missing, the ranks to divide among, and {file} has no micro_batches")
    written = read_layout_text(request.layout or f"dp={ranks}")
    dp = written.sizes.get("dp", ranks)
    if not dp or dp != (ranks or dp) or written.size("pp") * written.size("virtual") > 1:
        needed = f"dp={ranks}, as many ranks as micro_batches of {file} has" if ranks else "a number of ranks dp"
        raise ConfigError(f"--layout {written.text} must have {needed}, and no pipeline")
    text = written.text if "dp" in written.sizes else f"dp={dp},{written.text}"
    cluster = request.cluster or cluster_of("h100", dp * written.ranks_per_replica).name
    inputs = plan_inputs(replace(request, layout=text, cluster=cluster), length_source(file, request))
    assert inputs.layout is not None
    return inputs, inputs.layout


def _require_engine(profile: EngineProfile, inputs: PlanInputs, layout: ParallelLayout) -> None:
    require_layout(profile, layout)
    require_heads(profile, inputs.costs.model, layout)
    if profile.is_constant_in(layout):
        raise ConfigError(
            f"engine {profile.name} runs equally many micro-batches in all steps, ours has as many as each step needs; "
            "leave --engine out, or name deepspeed, whose ranks wait once a step too"
        )


def _headline(judged: JudgedSteps) -> str:
    ours, theirs = judged.ours, judged.theirs
    seconds, waiting = format_seconds(ours.step_s), format_percent(ours.waiting_share)
    if theirs is None:
        return f"Predicted: {seconds} a step, of which ranks wait {waiting}."
    return (
        f"Predicted: {seconds} a step instead of {format_seconds(theirs.step_s)}, "
        f"{theirs.step_s / ours.step_s:.2f} times as fast: ranks wait {format_percent(theirs.waiting_share)} of a step "
        f"in this partition, {waiting} in ours."
    )


def _remarks(judged: JudgedSteps) -> list[str]:
    """Name the step that loses most, and say where ours is no better, or keeps a limit that the run did not."""
    worst = max(judged.steps, key=lambda one: one.recorded.waiting_s)
    shares = [f"{format_percent(one.waiting_share)} of {format_seconds(one.step_s)}" for _, one in worst.divisions]
    slower = sum(one.recorded.step_s < one.ours.step_s for one in judged.steps)
    bound = f"any division takes {format_seconds(judged.bound_s)} a step or more, in the mean"
    remarks = {
        f"ranks wait longest in step {worst.step}: {', in ours '.join(shares)}; {bound}": True,
        f"ours takes longer than this partition in {counted(slower, 'step')}": slower,
        f"this partition breaks --context in {counted(judged.steps_beyond_limit, 'step')}, ours in none": (
            judged.steps_beyond_limit
        ),
    }
    return [text for text, is_so in remarks.items() if is_so]
