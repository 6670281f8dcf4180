"""`evenload plan`: which strategy is how fast on the user's lengths, model and cluster. Needs no GPU."""

from rich.console import Console

from evenload.cli.output_file import require_writable, write_output
from evenload.cli.plan_arguments import PlanArguments, plan_command_of
from evenload.cli.plan_files import plan_json, planned_steps_json, write_plan_trace
from evenload.cli.plan_found import FoundPlans, find_plans
from evenload.cli.plan_report import plan_report
from evenload.cli.plan_show import show_plans
from evenload.report.html import write_report

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
