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
from evenload.explore.evaluate import Evaluation
from evenload.explore.layout_search import layout_sizes
from evenload.explore.worst_batch import WorstBatch
from evenload.plan.strategies.flexpipe import FlexOptions
from evenload.report.units import format_seconds
from evenload.types.layout import ParallelLayout
from evenload.types.length_unit import LengthUnit, in_unit
from evenload.types.scaled_units import format_bytes


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
    size = f"{said['tokens']:,} {table.unit}" if said["tokens"] else f"{said['documents']:,} documents"
    unused = said["devices"] - layout.world_size
    devices = f" ({unused} of {said['devices']} devices unused)" if unused else ""
    lengths, counted = table.lengths, f"; tokeniser {table.tokenizer}" if table.tokenizer else ""
    return (
        f"evenload {version('evenload')} plan: {said['lengths']} ({len(lengths):,} documents, median "
        f"{int(np.median(lengths)):,}, longest {int(lengths.max()):,} {table.unit}{counted}), "
        f"model {said['model']} ({said['model_size']}), cluster {said['cluster']}, "
        f"layout {layout.describe()}{devices}, {size} a step, "
        f"{said['steps']} steps, context {said['context']:,}, overlong {said['overlong']}, seed {said['seed']}, "
        f"{coefficients.source} costs"
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
        f"{worst.strategy}: the worst of {worst.searched} global batches searched ({worst.drawn}: {worst.documents:,} "
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
