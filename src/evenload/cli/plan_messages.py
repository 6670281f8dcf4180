"""Sentences about a comparison of strategies: inputs, outcome, critical path, worst batches, engine."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import msgspec
import numpy as np

from evenload.cli.plan_inputs import PlanInputs
from evenload.cost.coefficients import CostCoefficients
from evenload.data.lengths import LengthTable
from evenload.errors import ConfigError, DataError, InfeasiblePlanError
from evenload.explore.evaluate import Evaluation, headline
from evenload.explore.worst_batch import WorstBatch
from evenload.integrations.evaluate import EngineEvaluation
from evenload.plan.strategies.baselines import BEST_FIT
from evenload.report.units import (
    format_interval,
    format_layout,
    format_percent,
    format_power_of_two,
    format_seconds,
)
from evenload.types.layout import ParallelLayout
from evenload.types.text import LengthUnit, counted, format_bytes, in_unit

_SAME = 0.0005
"""Factors that print alike."""


def inputs_message(
    inputs: dict[str, Any], table: LengthTable, layout: ParallelLayout, coefficients: CostCoefficients
) -> str:
    """List all inputs on one line, so that a copied output can be repeated."""
    size = f"{inputs['tokens']:,} {table.unit}" if inputs["tokens"] else counted(inputs["documents"], "document")
    unused = inputs["devices"] - layout.world_size
    devices = f" ({unused} of {inputs['devices']} devices unused)" if unused else ""
    lengths, tokenizer = table.lengths, f"; tokeniser {table.tokenizer}" if table.tokenizer else ""
    return (
        f"evenload {version('evenload')} plan: {inputs['lengths']} ({counted(len(lengths), 'document')}, median "
        f"{int(np.median(lengths)):,}, longest {int(lengths.max()):,} {table.unit}{tokenizer}), "
        f"model {inputs['model']} ({inputs['model_size']}), cluster {inputs['cluster']}, "
        f"layout {layout.describe()}{devices}, {size} a step, {counted(inputs['steps'], 'step')}, "
        f"context {inputs['context']:,}, overlong {inputs['overlong']}, seed {inputs['seed']}, "
        f"{coefficients.source} costs"
    )


def host_message(inputs: PlanInputs, coefficients: CostCoefficients) -> str:
    """Say that nothing limits what is offloaded, where the cluster's description leaves it out; "" = irrelevant."""
    can_offload = coefficients.host_link is not None and inputs.options.policy in ("choose", "offload")
    if inputs.host.limit_bytes is not None or not can_offload:
        return ""
    return (
        f"host memory: cluster {inputs.cluster.name} says no host_memory_bytes, so activations are offloaded as if "
        "its nodes had room for all"
    )


def bound_message(evaluation: Evaluation) -> str:
    """Say what bounds the best strategy's slowest step: the critical path, by rank and kind."""
    assert evaluation.best is not None, "only of a best strategy"
    proposals = evaluation.proposals[evaluation.best]
    proposal = max(proposals, key=lambda one: one.plan.predicted.step_time_s)
    dp_rank, path = proposal.critical_path()
    replica = f" of replica {dp_rank}" if proposal.plan.layout.dp > 1 else ""
    step = f" of step {proposal.plan.step}" if len(proposals) > 1 else ""
    after_s = proposal.plan.predicted.step_time_s - proposal.switch_s - path.makespan_s
    switch = f"switch of layout {format_seconds(proposal.switch_s)}, then " if proposal.switch_s else ""
    return (
        f"{evaluation.best}: critical path{step}: {switch}pipeline{replica} {format_seconds(path.makespan_s)}, "
        f"{path.describe()}; then reduction and optimizer {format_seconds(after_s)}"
    )


def headline_message(evaluation: Evaluation) -> str:
    """State the outcome in one sentence; "" where nothing fits memory."""
    figures = headline(evaluation)
    if figures is None:
        return ""
    interval = f" (90 % of steps: {format_interval(figures.interval_s)})" if figures.interval_s else ""
    differ = figures.baseline_layout not in (None, figures.layout)
    best_in = f" in {format_layout(figures.layout)}" if differ else ""
    baseline_in = f" in {format_layout(figures.baseline_layout)}" if differ else ""
    step = f"{format_seconds(figures.step_time_s)} a step{interval}"
    message = f"{figures.best}{best_in} is the fastest by prediction: {step}"
    if figures.factor is None or figures.baseline_window_tokens is None:
        names = [result.name for result in evaluation.results]
        why = "best_fit does not fit memory" if BEST_FIT.name in names else "best_fit was not compared"
        return f"{message}; {why}, so there is no factor"
    window = format_power_of_two(figures.baseline_window_tokens)
    if figures.best == BEST_FIT.name and figures.factor > 1 - _SAME:
        return f"{message}, and no other windows suit it better than its {window} tokens"
    bound = f"no plan in its layout takes less than {format_percent(figures.fraction_of_layout_bound)} of that"
    if figures.factor < 1 - _SAME:
        faster_s = format_seconds(figures.factor * figures.step_time_s)
        return (
            f"{figures.best}{best_in} is the fastest of those asked for by prediction: {step}; {bound}. best_fit in "
            f"windows of {window} tokens{baseline_in} (--set best_fit.window_tokens={figures.baseline_window_tokens}) "
            f"is faster: {faster_s} a step, {1 / figures.factor:.2f} times as fast"
        )
    message += f", {figures.factor:.2f} times as fast as best_fit in the windows that suit it best, {window} tokens"
    message += baseline_in
    if figures.reasons:
        lost = " and ".join(
            f"{one.cause} ({format_percent(one.baseline_share)} of its step, here {format_percent(one.best_share)})"
            for one in figures.reasons
        )
        message += f", which loses more to {lost}"
    return f"{message}; {bound}"


def baseline_row(evaluation: Evaluation) -> dict[str, Any] | None:
    """Return `best_fit` in the windows that suit it best, its name with their tokens where they were not requested."""
    if (baseline := evaluation.baseline) is None or baseline.window_tokens is None:
        return None
    requested = next(result for result in evaluation.results if result.name == BEST_FIT.name)
    row = msgspec.to_builtins(baseline)
    if baseline.step_time_s == requested.step_time_s:
        return row
    return row | {"name": f"{BEST_FIT.name} {format_power_of_two(baseline.window_tokens)}"}


def worst_message(worst: WorstBatch, memory_cap_bytes: int, unit: LengthUnit) -> str:
    """Say how much memory the worst batch of a search needs, and which documents it holds."""
    longest = ", ".join(f"{length:,}" for length in worst.longest)
    more = ", ..." if worst.documents > len(worst.longest) else ""
    policies = ", ".join(f"{policy} {count:,}" for policy, count in worst.policies.items())
    verdict = "fits" if worst.fits else f"does not fit: {worst.why}"
    if worst.fitting_policy:
        verdict += f"; --policy {worst.fitting_policy} fits it"
    if worst.leaves_out_deferred:
        verdict += (
            f". Documents that {worst.strategy} has put off in earlier steps may come on top; they are not counted"
        )
    return in_unit(
        f"{worst.strategy}: the worst of {counted(worst.searched, 'global batch')} searched ({worst.drawn}: "
        f"{worst.documents:,} documents of {longest}{more} tokens, {worst.tokens:,} in all) takes "
        f"{format_bytes(worst.peak_memory_bytes)} of {format_bytes(memory_cap_bytes)} with {policies} and {verdict}",
        unit,
    )


def engine_messages(engine: EngineEvaluation, own: Evaluation, unit: LengthUnit) -> tuple[str, ...]:
    """Say what the engine's table does not: the assumptions, the best of both, and what was left out."""
    messages = [
        f"{engine.engine}: predicted from the cost model of Evenload's runtime and the engine's order, padding and "
        "waiting; not measured on GPUs, its memory is not predicted (docs/engines.md)"
    ]
    messages += [
        f"{engine.engine}: Evenload's adapter does not run these plans: {one.why}. {one.instead}"
        for one in engine.not_adapted
    ]
    if engine.best:
        best = next(result for result in engine.results if result.name == engine.best)
        message = f"{engine.engine}: fastest {engine.best}"
        message += f" (as {best.planned_by})" if best.planned_by else ""
        message += f", {format_seconds(best.mean_step_time_s)} a step"
        if best.micro_batches_per_rank is not None:
            message += f", {counted(best.micro_batches_per_rank, 'micro-batch')} on every rank in every step"
        ours = next((result for result in own.results if result.name == own.best), None)
        if ours is not None and ours.mean_step_time_s is not None:
            message += f"; Evenload's own runtime: {ours.name}, {format_seconds(ours.mean_step_time_s)}"
        messages.append(message)
    messages += [f"left out on {engine.engine}: {one.name}: {one.why}" for one in engine.left_out]
    return tuple(in_unit(message, unit) for message in messages)


def rows_in_unit(rows: Sequence[dict[str, Any]], unit: LengthUnit) -> list[dict[str, Any]]:
    """Return rows of a comparison whose sentences name the unit that was counted."""
    return [row | {name: in_unit(row[name], unit) for name in ("why", "note") if name in row} for row in rows]


@contextmanager
def errors_in_unit(unit: LengthUnit) -> Iterator[None]:
    """Raise errors about lengths in the unit that was counted."""
    try:
        yield
    except (ConfigError, DataError, InfeasiblePlanError) as error:
        if unit == "tokens":
            raise
        raise type(error)(in_unit(str(error), unit)) from error
