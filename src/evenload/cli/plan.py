"""`evenload plan`: which strategy is how fast on the user's lengths, model and cluster, and its output as tables, JSON,
page and trace. Needs no GPU."""

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Console

from evenload.cli.options import require_writable, write_output
from evenload.cli.plan_arguments import PlanArguments, plan_command_of
from evenload.cli.plan_found import (
    FoundPlans,
    baseline_row,
    bound_line,
    engine_content,
    engine_lines,
    find_plans,
    rows_in_unit,
    say,
    worst_line,
)
from evenload.data.lengths import profile_lengths
from evenload.errors import InfeasiblePlanError
from evenload.explore.evaluate import Evaluation, headline
from evenload.explore.timelines import detailed_timeline
from evenload.report.chrome_trace import label_packs, write_chrome_trace
from evenload.report.html import write_report
from evenload.report.run_report import RunReport, RunSection, StepView
from evenload.report.table import ComparisonTable, EngineTable, LayoutTable
from evenload.report.units import format_layout
from evenload.stepplan.plan_file import encode_plan_file
from evenload.types.text import LengthUnit, format_bytes, in_unit


def show_plans(console: Console, found: FoundPlans) -> None:
    say(console, found.headline)
    if any(result.feasible for result in found.evaluation.results):
        console.print(ComparisonTable(found.rows, found.evaluation.best or "", unit=found.unit))
    else:
        say(console, *(f"{row['name']}: not feasible: {row['why']}" for row in found.rows))
    say(console, *(f"left out of --strategy all: {one.name}: {one.why}" for one in found.left_out))
    if found.evaluation.best:
        say(console, found.interval.describe(), bound_line(found.evaluation))
    say(console, *(f"{row['name']}: {row['note']}" for row in found.rows if row["note"]))
    for result in found.evaluation.results:
        if result.layout_decisions:
            console.print(LayoutTable(result.layout_decisions, f"{result.name}: layout of every step, predicted"))
    say(console, *(worst_line(one, found.memory_cap_bytes, found.unit) for one in found.worst or ()))
    if found.engine is not None:
        rows = rows_in_unit([msgspec.to_builtins(result) for result in found.engine.results], found.unit)
        console.print(
            EngineTable(rows, found.engine.best, f"on {found.engine.engine} ({found.engine.title}), predicted")
        )
        say(console, *engine_lines(found.engine, found.evaluation, found.unit))


def plan_report(found: FoundPlans) -> RunReport:
    evaluation = found.evaluation
    splits = {result.name: result.time_split for result in evaluation.results}
    decisions = {result.name: result.layout_decisions for result in evaluation.results}
    notes: dict[str, tuple[str, ...]] = {row["name"]: (row["note"],) for row in found.rows if row["note"]}
    for one in found.worst or ():
        notes[one.strategy] = (*notes.get(one.strategy, ()), worst_line(one, found.memory_cap_bytes, found.unit))
    lengths = np.array([document.num_tokens for batch in found.batches for document in batch.documents], np.int64)
    return RunReport(
        title=f"Evenload plan: {found.said['model']} on {found.said['cluster']}",
        headline=found.headline,
        facts=(
            *_facts(found.said, found.unit),
            ("predicted step times", found.interval.describe()),
            *_engine_facts(found),
        ),
        sections=tuple(
            RunSection(
                name=name,
                steps=tuple(
                    StepView(step=one.plan.step, predicted=detailed_timeline(one.plan, one.costs), plan=one.plan)
                    for one in proposals
                ),
                time_split=splits[name],
                memory_limit_bytes=found.memory_cap_bytes,
                notes=notes.get(name, ()),
                layout_decisions=decisions[name],
            )
            for name, proposals in evaluation.proposals.items()
            if proposals
        ),
        comparison=tuple(found.rows),
        best=evaluation.best or "",
        lengths=profile_lengths(lengths, ()) if len(lengths) else None,
        unit=found.unit,
    )


def _engine_facts(found: FoundPlans) -> tuple[tuple[str, str], ...]:
    if found.engine is None:
        return ()
    return ((f"on engine {found.engine.engine}", " · ".join(engine_lines(found.engine, found.evaluation, found.unit))),)


def _facts(inputs: Mapping[str, Any], unit: LengthUnit) -> tuple[tuple[str, str], ...]:
    formats = {"layout": format_layout}
    formats |= dict.fromkeys(("memory_cap_bytes", "host_memory_cap_bytes_per_node"), format_bytes)
    formats |= dict.fromkeys(("parameters", "active_parameters"), "{:,}".format)
    return tuple(
        (in_unit(name.replace("_bytes", "").replace("_", " "), unit), formats.get(name, str)(value))
        for name, value in inputs.items()
        if value is not None
    )


def plan_json(found: FoundPlans) -> bytes:
    content: dict[str, Any] = {
        "version": version("evenload"),
        "inputs": found.said,
        "headline": _headline_content(found),
        "strategies": rows_in_unit([msgspec.to_builtins(one) for one in found.evaluation.results], found.unit),
        "best": found.evaluation.best,
        "baseline": baseline_row(found.evaluation),
        "step_time_interval": msgspec.to_builtins(found.interval),
        "left_out": [msgspec.to_builtins(one) for one in found.left_out],
    }
    if found.engine is not None:
        content["engine"] = engine_content(found.engine)
    if found.worst is not None:
        content["worst"] = [msgspec.to_builtins(one) for one in found.worst]
    if found.layouts:
        content["layouts"] = [msgspec.to_builtins(result) for result in found.layouts]
    if found.searched is not None:
        content["search"] = found.searched.content()
    return msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n"


def _headline_content(found: FoundPlans) -> dict[str, Any] | None:
    """The sentence and its figures."""
    figures = headline(found.evaluation)
    return None if figures is None else {"text": found.headline, **msgspec.to_builtins(figures)}


def planned_steps_json(found: FoundPlans) -> bytes:
    proposals = (one for of_strategy in found.evaluation.proposals.values() for one in of_strategy)
    return encode_plan_file([proposal.plan for proposal in proposals])


def write_plan_trace(path: Path, evaluation: Evaluation) -> None:
    """The first step of the best strategy, or of any that could be planned."""
    planned = [name for name, proposals in evaluation.proposals.items() if proposals]
    if not planned:
        raise InfeasiblePlanError(f"--trace {path}: no strategy could be planned, so there is no timeline to write")
    proposal = evaluation.proposals[evaluation.best or planned[0]][0]
    timeline = detailed_timeline(proposal.plan, proposal.costs)
    write_chrome_trace(path, {"predicted": timeline}, label_packs(proposal.plan))


PIPED_WIDTH = 220
"""Columns of the table when the output is not a terminal."""


def run_plan(asked: PlanArguments) -> None:
    """Compare strategies on your document lengths, without a GPU.

    Draws global batches from the lengths, plans each with every strategy, simulates the pipeline over time with
    its memory, and shows who is fastest within memory.

    With the config.toml of a run in place of LENGTHS, the documents, tokeniser, model, layout, context, batch size and
    \\[plan.options] are those of the run; options given here win.

    [bold]Example[/bold]: evenload plan examples/lengths/github_dirs.npy.gz --model llama-7b --cluster h100x32
    --layout dp=4,pp=8 --context 16k --overlong truncate --documents 512

    Exit code: 0 ok, 2 wrong input, 3 no strategy fits, or not with the batch that --worst found.
    """
    require_writable(asked.json_file, asked.html, asked.trace, asked.emit_plan)
    console = Console() if Console().is_terminal else Console(width=PIPED_WIDTH)
    found = find_plans(asked, console)
    show_plans(console, found)
    _write(asked, found)
    found.require_feasible()


plan_command = plan_command_of(run_plan)


def _write(asked: PlanArguments, found: FoundPlans) -> None:
    if asked.json_file:
        write_output(asked.json_file, plan_json(found))
    if asked.emit_plan:
        write_output(asked.emit_plan, planned_steps_json(found))
    if asked.html:
        write_report(asked.html, plan_report(found))
    if asked.trace:
        write_plan_trace(asked.trace, found.evaluation)
