"""The page of `evenload bench --html`: strategies side by side, every batch as predicted and as measured.

A batch was run in several rounds; the timeline that is drawn is that of the round whose step time is in the middle, so
that one disturbed round is in no picture.
"""

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from evenload.bench.runs import BenchResult, StrategyRuns
from evenload.cost.pack_cost import PackCosts
from evenload.explore.detailed_timeline import detailed_timeline
from evenload.explore.time_split import split_planned_step
from evenload.report.run_report import RunReport, RunSection, StepView
from evenload.report.units import format_change
from evenload.runtime.step_metrics import StepReport
from evenload.types.time_split import mean_time_split


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
