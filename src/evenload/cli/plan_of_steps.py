"""`evenload plan --lengths-per-step`: what the recorded steps of any trainer lost to waiting, and what they would take
as `evenload.micro_batches` divides them."""

from collections.abc import Mapping
from dataclasses import fields, replace
from importlib.metadata import version

import numpy as np
from rich.console import Console

from evenload.cli.options import indented_json, print_lines, progress_bar, shown_name, write_output
from evenload.cli.plan_inputs import PlanInputs, plan_inputs
from evenload.cli.plan_request import PlanRequest, length_source
from evenload.cost.pack_cost import PackCosts
from evenload.errors import ConfigError
from evenload.explore.recorded_steps import JudgedStep, Waits, fitted_cost, judge_steps, read_steps
from evenload.integrations.catalog import EngineProfile, engine_named, require_heads, require_layout
from evenload.types.cluster import cluster_of
from evenload.types.layout import ParallelLayout, read_layout_text
from evenload.types.text import counted, format_percent, format_seconds

_TAKEN = ("lengths_per_step", "model", "cluster", "layout", "context", "engine", "cost", "json_file")


def judge_recorded_steps(request: PlanRequest, file: str, console: Console) -> None:
    """Print what is predicted of the steps in `file`, and write it as JSON where that is asked for."""
    _require_compatible(request)
    profile = engine_named(request.engine) if request.engine else None
    context = request.tokens_of("context")
    steps = read_steps(file, context, equal_counts=profile is None or profile.equal_counts)
    if not (limit := context or max(step.largest_tokens for step in steps.values())):
        raise ConfigError(f"--context is missing, the most tokens of a micro-batch, and {file} has no micro_batches")
    inputs, layout = _inputs(request, file, len(next(iter(steps.values())).micro_batches or ()), profile)
    waits: Waits = "micro_batch" if profile is None or profile.waits_in(layout) else "step"
    costs = PackCosts(inputs.costs.model, inputs.costs.of(layout), layout)
    cost = fitted_cost(costs, [length for step in steps.values() for length in step.lengths])
    with progress_bar() as on_progress:
        judged = judge_steps(steps, costs, cost, limit, waits, on_progress)
    call = f"evenload.micro_batches(lengths, {layout.dp}, {limit}, waits={waits!r}, cost=evenload.{cost})"
    at = "at every micro-batch" if waits == "micro_batch" else "once a step"
    shown: dict[str, str | int] = {
        "lengths_per_step": shown_name(file),
        "steps": len(steps),
        "documents": sum(len(step.lengths) for step in steps.values()),
        "tokens": sum(sum(step.lengths) for step in steps.values()),
        "model": inputs.model_name,
        "cluster": inputs.cluster.name,
        "costs": costs.coefficients.source,
        "layout": layout.describe(),
        "ranks_wait": f"{at} ({f'engine {profile.name}' if profile else 'no --engine named'})",
        "max_tokens": limit,
        "max_tokens_from": "--context" if context else "the largest micro-batch",
    }
    facts = (f"{name.replace('_', ' ')} {f'{one:,}' if isinstance(one, int) else one}" for name, one in shown.items())
    mean = JudgedStep(*np.mean(list(judged.values()), axis=0).tolist())
    beyond = sum(step.largest_tokens > limit for step in steps.values())
    headline, *remarks = _findings(judged, mean, beyond)
    messages = [f"cost: {message}" for message in inputs.costs.messages(layout)]
    print_lines(console, headline, ", ".join(facts), *remarks, *messages, f"ours: {call}")
    if request.json_file:
        content: dict[str, object] = {"version": version("evenload"), "headline": headline, "inputs": shown}
        content |= {"call": call, "steps_beyond_limit": beyond, "mean": mean._asdict()}
        content["steps"] = {line: one._asdict() for line, one in judged.items()}
        write_output(request.json_file, indented_json(content))


def _require_compatible(request: PlanRequest) -> None:
    if request.lengths is not None:
        raise ConfigError(f"LENGTHS {request.lengths} and --lengths-per-step exclude each other; give one")
    others = [one for one in fields(request) if one.name not in _TAKEN and getattr(request, one.name) != one.default]
    if others:
        names = (next(iter(one.metadata["typer"].param_decls), f"--{one.name.replace('_', '-')}") for one in others)
        raise ConfigError(f"--lengths-per-step judges steps as they are: leave out {', '.join(names)}")


def _inputs(
    request: PlanRequest, file: str, ranks: int, profile: EngineProfile | None
) -> tuple[PlanInputs, ParallelLayout]:
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
    layout = inputs.layout
    assert layout is not None
    if profile:
        require_layout(profile, layout)
        require_heads(profile, inputs.costs.model, layout)
    if profile and profile.is_constant_in(layout):
        raise ConfigError(
            f"engine {profile.name} runs equally many micro-batches in all steps, ours has as many as each step needs; "
            "leave --engine out, or name deepspeed, whose ranks wait once a step too"
        )
    return inputs, layout


def _findings(judged: Mapping[int, JudgedStep], mean: JudgedStep, beyond: int) -> list[str]:
    """Compare both divisions, name the step that loses most, and say where ours is no better, or keeps a limit that the
    run did not, in so many steps `beyond` it."""
    shares = [format_percent(waiting_s / step_s) for step_s, waiting_s in mean.divisions]
    headline = f"Predicted: {format_seconds(mean.step_s)} a step, of which ranks wait {shares[0]}."
    if len(shares) > 1:
        headline = (
            f"Predicted: {format_seconds(mean.step_s)} a step instead of {format_seconds(mean.recorded_step_s)}, "
            f"{mean.recorded_step_s / mean.step_s:.2f} times as fast: ranks wait {shares[0]} of a step in this "
            f"partition, {shares[1]} in ours."
        )
    worst = max(judged, key=lambda line: judged[line].divisions[0][1])
    waits = (f"{format_percent(part / whole)} of {format_seconds(whole)}" for whole, part in judged[worst].divisions)
    bound = f"any division takes {format_seconds(mean.bound_s)} a step or more, in the mean"
    slower = sum(one.recorded_step_s < one.step_s for one in judged.values())
    findings = {
        headline: True,
        f"ranks wait longest in step {worst}: {', in ours '.join(waits)}; {bound}": True,
        f"ours takes longer than this partition in {counted(slower, 'step')}": slower,
        f"this partition breaks --context in {counted(beyond, 'step')}, ours in none": beyond,
    }
    return [text for text, is_so in findings.items() if is_so]
