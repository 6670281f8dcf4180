"""`evenload plan`: which strategy is how fast on the user's lengths, model and cluster. Needs no GPU."""

from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.markup import escape

from evenload.cli.length_source import length_source, unit_line
from evenload.cli.output_file import require_writable, write_output
from evenload.cli.plan_arguments import PlanArguments, plan_command_of
from evenload.cli.plan_engine import engine_content, engine_evaluation, engine_layout, engine_lines, require_engine
from evenload.cli.plan_inputs import PlanInputs, plan_inputs
from evenload.cli.plan_layout import layouts_that_fit, planned_in, searched_layouts
from evenload.cli.plan_lines import bound_line, errors_in_unit, first_line, inputs_said, rows_in_unit, worst_line
from evenload.cli.plan_report import Comparison, plan_report
from evenload.cli.plan_strategies import asked_strategies, chosen_strategies
from evenload.cli.progress_bar import progress_bar
from evenload.errors import InfeasiblePlanError
from evenload.explore.detailed_timeline import detailed_timeline
from evenload.explore.evaluate import Evaluation, evaluate_strategies
from evenload.explore.prediction_interval import prediction_interval
from evenload.explore.sampled_batches import SampledBatch
from evenload.explore.worst_batch import WorstBatch, find_worst
from evenload.plan.planner import StepPlanner
from evenload.plan.reconfiguration.flex_planner import FlexPlanner
from evenload.plan.strategies.registry import STRATEGIES
from evenload.report.chrome_trace import write_chrome_trace
from evenload.report.engine_table import EngineTable
from evenload.report.html import write_report
from evenload.report.layout_table import LayoutTable
from evenload.report.pack_label import label_packs
from evenload.report.table import ComparisonTable
from evenload.stepplan.plan_file import encode_plan_file
from evenload.types.layout import ParallelLayout

PIPED_WIDTH = 220
"""Columns of the table when the output is not a terminal."""


def run_plan(asked: PlanArguments) -> None:
    """Compare strategies on your document lengths, without a GPU.

    Draws global batches from the lengths, plans each with every strategy, simulates the pipeline over time with
    its memory, and shows who is fastest within memory.

    With the config.toml of a run in place of LENGTHS, the documents, tokeniser, model, layout, context, batch size and
    [plan.options] are those of the run; options given here win.

    [bold]Example[/bold]: evenload plan examples/lengths/github_dirs.npy.gz --model llama-7b --cluster h100x32
    --layout dp=4,pp=8 --context 16k --overlong truncate --documents 512

    Exit code: 0 ok, 2 wrong input, 3 no strategy fits, or not with the batch that --worst found.
    """
    # Everything that can be wrong without looking into a document is found first.
    require_writable(asked.json_file, asked.html, asked.trace, asked.emit_plan)
    strategies = asked_strategies(asked.strategy)
    source = length_source(
        asked.lengths,
        tokenizer=asked.tokenizer,
        record=asked.record,
        include=asked.include,
        on_corrupt=asked.on_corrupt,
        model=asked.model,
        settings=asked.settings,
    )
    inputs = plan_inputs(asked, source)
    if asked.engine:
        inputs = replace(inputs, layout=engine_layout(inputs, asked.engine))
    # Counting the tokens of documents takes time; the spinner shows on terminals only.
    with Console(stderr=True).status(f"reading {escape(asked.lengths)}"):
        table = source.read()
    console = Console() if Console().is_terminal else Console(width=PIPED_WIDTH)
    with errors_in_unit(table.unit):
        batches = inputs.batches.sample(table.lengths, steps=asked.steps, seed=asked.seed)
        layouts = searched_layouts(inputs, batches, strategies, console) if asked.search_layout else ()
        layout = layouts[0].parallel_layout() if layouts else planned_in(inputs, batches, strategies)
        if asked.engine:
            require_engine(asked.engine, inputs, strategies, layout)
    coefficients = inputs.costs.of(layout)
    said = inputs_said(asked, inputs, source.name, table, layout)
    _say(console, first_line(said, table, layout, coefficients), unit_line(table))
    _say(console, *(f"cost: {note}" for note in inputs.costs.notes(layout)))
    names, left_out = chosen_strategies(strategies, layout, inputs.options)
    evaluation = _evaluated(inputs, layout, batches, names)
    engine = engine_evaluation(asked.engine, inputs, layout, batches, strategies) if asked.engine else None
    found = Comparison(
        said=said,
        batches=batches,
        evaluation=evaluation,
        rows=rows_in_unit([msgspec.to_builtins(result) for result in evaluation.results], table.unit),
        left_out=left_out,
        layouts=layouts,
        unit=table.unit,
        worst=_worst(asked, inputs, layout, table.lengths, strategies, evaluation),
        memory_cap_bytes=inputs.memory_cap_bytes,
        interval=prediction_interval(coefficients, layout),
        engine=engine,
    )
    _show(console, found)
    _write(asked, found)
    # What an engine holds depends on its settings, so memory refuses plans for Evenload's own runtime only.
    if evaluation.best is None and not (engine and engine.best):
        closest = min(found.rows, key=lambda row: row["peak_memory_bytes"] or float("inf"))
        hint = "" if layouts else f"; {layouts_that_fit(inputs, batches, strategies)}"
        raise InfeasiblePlanError(f"no strategy fits; the closest: {closest['why']}{hint}")
    if exceeding := [one.strategy for one in found.worst if not one.fits]:
        raise InfeasiblePlanError(
            f"the lengths hold global batches that exceed memory under {', '.join(exceeding)} (the lines above name "
            "one for each); train with a policy that fits, in another layout, or on smaller batches"
        )


plan_command = plan_command_of(run_plan)


def _evaluated(
    inputs: PlanInputs,
    layout: ParallelLayout,
    batches: Sequence[SampledBatch],
    names: tuple[str, ...],
) -> Evaluation:
    costs = inputs.costs
    planner = StepPlanner(costs.model, costs.of(layout), layout, inputs.memory_cap_bytes, inputs.options, inputs.host)
    flexible = FlexPlanner(planner, costs.of, layouts=inputs.layouts)
    with progress_bar() as on_progress:
        return evaluate_strategies(planner, batches, names, flexible, on_progress=on_progress)


def _worst(
    asked: PlanArguments,
    inputs: PlanInputs,
    layout: ParallelLayout,
    lengths: NDArray[np.int64],
    strategies: tuple[str, ...] | None,
    evaluation: Evaluation,
) -> tuple[WorstBatch, ...]:
    """Of the strategies asked for by name, else of the best one; those that change the layout have no one limit."""
    if asked.worst is None or evaluation.best is None:
        return ()
    planned = [name for name in strategies or (evaluation.best,) if evaluation.proposals[name]]
    planner = StepPlanner(
        inputs.costs.model, inputs.costs.of(layout), layout, inputs.memory_cap_bytes, inputs.options, inputs.host
    )
    with progress_bar() as on_progress:
        return tuple(
            find_worst(planner, lengths, inputs.batches, name, asked.worst, seed=asked.seed, on_progress=on_progress)
            for name in planned
            if not STRATEGIES.named(name).changes_layout
        )


def _say(console: Console, *lines: str) -> None:
    for line in filter(None, lines):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _show(console: Console, found: Comparison) -> None:
    if any(result.feasible for result in found.evaluation.results):
        console.print(ComparisonTable(found.rows, found.evaluation.best or "", unit=found.unit))
    else:
        _say(console, *(f"{row['name']}: not feasible: {row['why']}" for row in found.rows))
    _say(console, *(f"left out of --strategy all: {one.name}: {one.why}" for one in found.left_out))
    if found.evaluation.best:
        _say(console, found.interval.describe(), bound_line(found.evaluation))
    _say(console, *(f"{row['name']}: {row['note']}" for row in found.rows if row["note"]))
    for result in found.evaluation.results:
        if result.layout_decisions:
            console.print(LayoutTable(result.layout_decisions, f"{result.name}: layout of every step, predicted"))
    _say(console, *(worst_line(one, found.memory_cap_bytes, found.unit) for one in found.worst))
    if found.engine is not None:
        rows = rows_in_unit([msgspec.to_builtins(result) for result in found.engine.results], found.unit)
        console.print(
            EngineTable(rows, found.engine.best, f"on {found.engine.engine} ({found.engine.title}), predicted")
        )
        _say(console, *engine_lines(found.engine, found.evaluation, found.unit))


def _write(asked: PlanArguments, found: Comparison) -> None:
    evaluation = found.evaluation
    if asked.json_file:
        content = {
            "version": version("evenload"),
            "inputs": found.said,
            "strategies": found.rows,
            "best": evaluation.best,
            "step_time_interval": msgspec.to_builtins(found.interval),
            "left_out": [msgspec.to_builtins(one) for one in found.left_out],
        }
        if found.engine is not None:
            content["engine"] = engine_content(found.engine)
        if asked.worst is not None:
            content["worst"] = [msgspec.to_builtins(one) for one in found.worst]
        if found.layouts:
            content["layouts"] = [msgspec.to_builtins(result) for result in found.layouts]
        write_output(asked.json_file, msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n")
    if asked.emit_plan:
        plans = [proposal.plan for proposals in evaluation.proposals.values() for proposal in proposals]
        write_output(asked.emit_plan, encode_plan_file(plans))
    if asked.html:
        write_report(asked.html, plan_report(found))
    if asked.trace:
        _write_trace(asked.trace, evaluation)


def _write_trace(path: Path, evaluation: Evaluation) -> None:
    planned = [name for name, proposals in evaluation.proposals.items() if proposals]
    if not planned:
        raise InfeasiblePlanError(f"--trace {path}: no strategy could be planned, so there is no timeline to write")
    proposal = evaluation.proposals[evaluation.best or planned[0]][0]
    timeline = detailed_timeline(proposal.plan, proposal.costs)
    write_chrome_trace(path, {"predicted": timeline}, label_packs(proposal.plan))
