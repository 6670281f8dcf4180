"""What `evenload plan` says in words: its inputs, and what bounds the best strategy, in the unit that was counted."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import msgspec
import numpy as np

from evenload.cli.plan_arguments import PlanArguments
from evenload.cli.plan_inputs import PlanInputs
from evenload.cost.coefficients import CostCoefficients
from evenload.data.lengths import LengthTable
from evenload.errors import ConfigError, DataError, InfeasiblePlanError
from evenload.explore.evaluate import Evaluation, Headline
from evenload.explore.layout_search import layout_sizes
from evenload.explore.worst_batch import WorstBatch
from evenload.plan.strategies.best_fit import BEST_FIT
from evenload.plan.strategies.flexpipe import FlexOptions
from evenload.report.units import (
    format_interval,
    format_layout,
    format_percent,
    format_power_of_two,
    format_seconds,
)
from evenload.types.counted import counted
from evenload.types.layout import ParallelLayout
from evenload.types.length_unit import LengthUnit, in_unit
from evenload.types.scaled_units import format_bytes

_SAME = 0.0005
"""Factors that print alike."""


def inputs_said(
    asked: PlanArguments, inputs: PlanInputs, lengths: str, table: LengthTable, layout: ParallelLayout
) -> dict[str, Any]:
    """`inputs` of `--json`: everything that decides the figures."""
    options = inputs.options
    return {
        "lengths": lengths,
        "unit": table.unit,
        "tokenizer": table.tokenizer,
        "model": inputs.model_name,
        "model_size": inputs.costs.model.describe_size(),
        "parameters": inputs.costs.model.num_parameters,
        "active_parameters": inputs.costs.model.num_active_parameters,
        "cluster": inputs.cluster_name,
        "layout": layout_sizes(layout),
        "stage_layers": layout.stage_counts,
        "devices": inputs.machines.num_devices,
        "documents": inputs.batches.num_documents,
        "tokens": inputs.batches.num_tokens,
        "context": inputs.batches.context,
        "overlong": inputs.batches.overlong,
        "policy": options.policy,
        "dp_merge": options.dp_merge,
        "window": options.window,
        "max_delay_steps": options.max_delay_steps,
        "strategy_options": {own.__struct_config__.tag: msgspec.to_builtins(own) for own in options.strategies},
        "known_steps": options.own(FlexOptions).known_steps,
        "steps": asked.steps,
        "seed": asked.seed,
        "cost": inputs.cost_name,
        "memory_cap_bytes": inputs.memory_cap_bytes,
        "host_memory_cap_bytes_per_node": inputs.host.limit_bytes,
    }


def first_line(said: dict[str, Any], table: LengthTable, layout: ParallelLayout, coefficients: CostCoefficients) -> str:
    """All inputs on one line, so that a copied output can be repeated."""
    size = f"{said['tokens']:,} {table.unit}" if said["tokens"] else counted(said["documents"], "document")
    unused = said["devices"] - layout.world_size
    devices = f" ({unused} of {said['devices']} devices unused)" if unused else ""
    lengths, tokenizer = table.lengths, f"; tokeniser {table.tokenizer}" if table.tokenizer else ""
    return (
        f"evenload {version('evenload')} plan: {said['lengths']} ({counted(len(lengths), 'document')}, median "
        f"{int(np.median(lengths)):,}, longest {int(lengths.max()):,} {table.unit}{tokenizer}), "
        f"model {said['model']} ({said['model_size']}), cluster {said['cluster']}, "
        f"layout {layout.describe()}{devices}, {size} a step, "
        f"{counted(said['steps'], 'step')}, context {said['context']:,}, overlong {said['overlong']}, seed "
        f"{said['seed']}, "
        f"{coefficients.source} costs"
    )


def host_line(inputs: PlanInputs, coefficients: CostCoefficients) -> str:
    """That nothing limits what is offloaded, where the cluster's description leaves it out; "" = it does not matter."""
    can_offload = coefficients.host_link is not None and inputs.options.policy in ("choose", "offload")
    if inputs.host.limit_bytes is not None or not can_offload:
        return ""
    return (
        f"host memory: cluster {inputs.machines.name} says no host_memory_bytes, so activations are offloaded as if "
        "its nodes had room for all"
    )


def bound_line(evaluation: Evaluation) -> str:
    """What bounds the best strategy's slowest step: the critical path, by rank and kind."""
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


def headline_line(found: Headline | None, evaluation: Evaluation) -> str:
    """The comparison in one sentence; "" where nothing fits memory."""
    if found is None:
        return ""
    interval = f" (90 % of steps: {format_interval(found.interval_s)})" if found.interval_s else ""
    apart = found.baseline_layout not in (None, found.layout)
    where = f" in {format_layout(found.layout)}" if apart else ""
    step = f"{format_seconds(found.step_time_s)} a step{interval}"
    said = f"{found.best}{where} is the fastest by prediction: {step}"
    names = [result.name for result in evaluation.results]
    if found.factor is None or found.baseline_window_tokens is None:
        why = "best_fit does not fit memory" if BEST_FIT.name in names else "best_fit was not compared"
        return f"{said}; {why}, so there is no factor"
    window = format_power_of_two(found.baseline_window_tokens)
    if found.best == BEST_FIT.name and found.factor > 1 - _SAME:
        return f"{said}, and no other windows suit it better than its {window} tokens"
    bound = f"no plan in its layout takes less than {format_percent(found.fraction_of_layout_bound)} of that"
    if found.factor < 1 - _SAME:
        there = f" in {format_layout(found.baseline_layout)}" if apart else ""
        faster_s = format_seconds(found.factor * found.step_time_s)
        return (
            f"{found.best}{where} is the fastest of those asked for by prediction: {step}; {bound}. best_fit in "
            f"windows of {window} tokens{there} (--set best_fit.window_tokens={found.baseline_window_tokens}) is "
            f"faster: {faster_s} a step, {1 / found.factor:.2f} times as fast"
        )
    said += f", {found.factor:.2f} times as fast as best_fit in the windows that suit it best, {window} tokens"
    said += f" in {format_layout(found.baseline_layout)}" if apart else ""
    if found.reasons:
        lost = " and ".join(
            f"{one.cause} ({format_percent(one.baseline_share)} of its step, here {format_percent(one.best_share)})"
            for one in found.reasons
        )
        said += f", which loses more to {lost}"
    return f"{said}; {bound}"


def comparison_rows(evaluation: Evaluation, unit: LengthUnit) -> list[dict[str, Any]]:
    """What tables show: strategies as they were asked for, and behind `best_fit` the baseline where its windows are
    others."""
    rows = []
    for result in evaluation.results:
        rows.append(msgspec.to_builtins(result))
        if result.name == BEST_FIT.name and (row := baseline_row(evaluation)) and row["name"] != BEST_FIT.name:
            rows.append(row)
    return rows_in_unit(rows, unit)


def baseline_row(evaluation: Evaluation) -> dict[str, Any] | None:
    """`best_fit` in the windows that suit it best, its name with their tokens where they were not asked for."""
    if (found := evaluation.baseline) is None or found.window_tokens is None:
        return None
    as_asked = next(result for result in evaluation.results if result.name == BEST_FIT.name)
    row = msgspec.to_builtins(found)
    if found.step_time_s == as_asked.step_time_s:
        return row
    return row | {"name": f"{BEST_FIT.name} {format_power_of_two(found.window_tokens)}"}


def worst_line(worst: WorstBatch, memory_cap_bytes: int, unit: LengthUnit) -> str:
    """The most memory that was found to be needed, and by which documents."""
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
        f"{worst.documents:,} "
        f"documents of {longest}{more} tokens, {worst.tokens:,} in all) takes {format_bytes(worst.peak_memory_bytes)} "
        f"of {format_bytes(memory_cap_bytes)} with {policies} and {verdict}",
        unit,
    )


def rows_in_unit(rows: Sequence[dict[str, Any]], unit: LengthUnit) -> list[dict[str, Any]]:
    """Rows of the comparison whose sentences name the unit that was counted."""
    words = ("why", "note")
    return [row | {name: in_unit(row[name], unit) for name in words if name in row} for row in rows]


@contextmanager
def errors_in_unit(unit: LengthUnit) -> Iterator[None]:
    """Errors about lengths, in the unit that was counted."""
    try:
        yield
    except (ConfigError, DataError, InfeasiblePlanError) as error:
        if unit == "tokens":
            raise
        raise type(error)(in_unit(str(error), unit)) from error
