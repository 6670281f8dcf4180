"""Files of `evenload plan`: all figures (`--json`), every planned step (`--emit-plan`), a timeline (`--trace`)."""

from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from evenload.cli.plan_engine import engine_content
from evenload.cli.plan_found import FoundPlans
from evenload.cli.plan_lines import baseline_row, rows_in_unit
from evenload.errors import InfeasiblePlanError
from evenload.explore.detailed_timeline import detailed_timeline
from evenload.explore.evaluate import Evaluation, headline
from evenload.report.chrome_trace import label_packs, write_chrome_trace
from evenload.stepplan.plan_file import encode_plan_file


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
