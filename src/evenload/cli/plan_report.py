"""The page of `evenload plan --html`: all strategies and all steps of an evaluation as a `RunReport`."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from evenload.cli.plan_engine import engine_lines
from evenload.cli.plan_found import FoundPlans
from evenload.cli.plan_lines import worst_line
from evenload.data.length_profile import profile_lengths
from evenload.explore.detailed_timeline import detailed_timeline
from evenload.report.run_report import RunReport, RunSection, StepView
from evenload.report.units import format_layout
from evenload.types.length_unit import LengthUnit, in_unit
from evenload.types.scaled_units import format_bytes


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
