"""What `evenload plan` shows once all is planned: tables and sentences, for the terminal and `str(Comparison)`."""

import msgspec
from rich.console import Console

from evenload.cli.plan_engine import engine_lines
from evenload.cli.plan_found import FoundPlans, say
from evenload.cli.plan_lines import bound_line, rows_in_unit, worst_line
from evenload.report.table import ComparisonTable, EngineTable, LayoutTable


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
