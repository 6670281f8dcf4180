"""`evenload plan`: which strategy is how fast on the user's lengths, model and cluster. Needs no GPU."""

from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer
from rich.console import Console
from rich.markup import escape

from evenload.cli.length_source import (
    SOURCE_HELP,
    IncludeOption,
    OnCorruptOption,
    RecordOption,
    TokenizerOption,
    length_source,
    unit_line,
)
from evenload.cli.output_file import require_writable, write_output
from evenload.cli.plan_inputs import DEFAULT_DOCUMENTS, AskedPlan, plan_inputs
from evenload.cli.plan_layout import layouts_that_fit, planned_in, searched_layouts
from evenload.cli.plan_lines import bound_line, errors_in_unit, first_line, inputs_said, rows_in_unit
from evenload.cli.plan_report import plan_report
from evenload.cli.plan_strategies import STRATEGY_HELP, asked_strategies, chosen_strategies
from evenload.cli.progress_bar import progress_bar
from evenload.cli.token_count import HELP as COUNTS
from evenload.cli.token_count import parse_tokens
from evenload.errors import InfeasiblePlanError
from evenload.plan.detailed_timeline import detailed_timeline
from evenload.plan.evaluate import Evaluation, evaluate_strategies
from evenload.plan.flex_planner import FlexPlanner
from evenload.plan.fmop import FlexOptions
from evenload.plan.global_batch import sample_global_batches
from evenload.plan.layout_search import LayoutResult
from evenload.plan.plan_file import encode_plan_file
from evenload.plan.planner import StepPlanner
from evenload.report.chrome_trace import write_chrome_trace
from evenload.report.html import write_report
from evenload.report.pack_label import label_packs
from evenload.report.table import comparison_table
from evenload.types.cluster_catalog import BUILT_IN

CLUSTER_HELP = (
    f"Built-in name ({', '.join(BUILT_IN)}, then x and how many: h100x32), or a TOML file such as "
    "examples/clusters/two_nodes.toml (explained in docs/guide.md)."
)
PIPED_WIDTH = 220
"""Columns of the table when the output is not a terminal."""


def plan_command(
    lengths: Annotated[str, typer.Argument(metavar="LENGTHS", help=SOURCE_HELP)],
    cluster: Annotated[str, typer.Option(help=CLUSTER_HELP)],
    model: Annotated[
        str | None,
        typer.Option(
            help="Built-in name (llama3-8b, qwen3-8b, ...) or an HF config.json. Only with a config.toml not needed."
        ),
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option(
            help="For example dp=4,pp=8. Also virtual=2. Default: the shallowest that fits. Stages get layers by cost."
        ),
    ] = None,
    documents: Annotated[
        int | None, typer.Option(help=f"Documents of a global batch (default {DEFAULT_DOCUMENTS}).")
    ] = None,
    tokens: Annotated[
        str | None, typer.Option(metavar="TOKENS", help=f"Tokens of a global batch, instead of --documents. {COUNTS}")
    ] = None,
    context: Annotated[
        str | None,
        typer.Option(
            metavar="TOKENS",
            help=f"Longest document trained whole, and the most tokens of a pack (default 128k). {COUNTS}",
        ),
    ] = None,
    overlong: Annotated[
        Literal["error", "split", "truncate", "drop"] | None,
        typer.Option(help="What happens to longer documents (default error)."),
    ] = None,
    tokenizer: TokenizerOption = None,
    record: RecordOption = None,
    include: IncludeOption = None,
    on_corrupt: OnCorruptOption = None,
    strategy: Annotated[str, typer.Option(help=STRATEGY_HELP)] = "all",
    dp_merge: Annotated[
        bool | None,
        typer.Option(
            "--dp-merge/--no-dp-merge",
            help="Let replicas share documents too long for one of them (slimpack), where faster (default on).",
        ),
    ] = None,
    policy: Annotated[
        Literal["choose", "replay", "recompute", "offload"] | None,
        typer.Option(
            help="What documents keep between forward and backward. 'choose' (default): all of it where that fits "
            "memory, else some are recomputed or offloaded."
        ),
    ] = None,
    window: Annotated[
        int | None, typer.Option(help="Global batches over which fixed_greedy and fixed_exact pack (default 1).")
    ] = None,
    max_delay_steps: Annotated[
        int | None,
        typer.Option(help="Most steps by which wlb and fixed_* with --window train a document later (default 8)."),
    ] = None,
    known_steps: Annotated[
        int, typer.Option(help="Coming batches whose lengths flexpipe knows: over them a switch of layout must pay.")
    ] = 1,
    steps: Annotated[
        int,
        typer.Option(help="Global batches to plan; wlb needs many to put documents off, flexpipe to switch layouts."),
    ] = 1,
    seed: Annotated[int, typer.Option(help="Of the batches drawn from the lengths.")] = 0,
    cost: Annotated[Path | None, typer.Option(help="Measured cost file; default: data-sheet numbers.")] = None,
    search_layout: Annotated[
        bool,
        typer.Option(
            "--search-layout",
            help="Rank all dp x cp x pp x tp x virtual layouts of the cluster (seconds to minutes); use the best.",
        ),
    ] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures as JSON.")] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write a page: table, losses, timelines, memory, documents.")
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="Write the best strategy's timeline for Perfetto.")] = None,
    emit_plan: Annotated[Path | None, typer.Option(help="Write every planned step as JSON.")] = None,
) -> None:
    """Compare strategies on your document lengths, without a GPU.

    Draws global batches from the lengths, plans each with every strategy, simulates the pipeline over time with
    its memory, and shows who is fastest within memory.

    With the config.toml of a run in place of LENGTHS, the documents, tokeniser, model, layout, context, batch size and
    [plan.options] are those of the run; options given here win.

    [bold]Example[/bold]: evenload plan examples/lengths/github_dirs.npy.gz --model llama-7b --cluster h100x32
    --layout dp=4,pp=8 --context 16k --overlong truncate --documents 512

    Exit code: 0 ok, 2 wrong input, 3 no strategy fits.
    """
    # Everything that can be wrong without looking into a document is found first.
    require_writable(json_file, html, trace, emit_plan)
    asked = asked_strategies(strategy)
    source = length_source(
        lengths, tokenizer=tokenizer, record=record, include=include, on_corrupt=on_corrupt, model=model
    )
    inputs = plan_inputs(
        AskedPlan(
            model=model,
            cluster=cluster,
            layout=layout,
            search_layout=search_layout,
            documents=documents,
            tokens=None if tokens is None else parse_tokens("--tokens", tokens),
            context=None if context is None else parse_tokens("--context", context),
            overlong=overlong,
            policy=policy,
            dp_merge=dp_merge,
            window=window,
            max_delay_steps=max_delay_steps,
            cost=cost,
        ),
        source,
    )
    flexibility = FlexOptions(known_steps=known_steps)
    # Counting the tokens of documents takes time; the spinner shows on terminals only.
    with Console(stderr=True).status(f"reading {escape(lengths)}"):
        table = source.read()
    with errors_in_unit(table.unit):
        batches = sample_global_batches(
            table.lengths,
            steps=steps,
            seed=seed,
            num_documents=inputs.documents,
            num_tokens=inputs.tokens,
            context=inputs.context,
            overlong=inputs.overlong,
        )
    console = Console() if Console().is_terminal else Console(width=PIPED_WIDTH)
    layouts: tuple[LayoutResult, ...] = ()
    with errors_in_unit(table.unit):
        if search_layout:
            layouts = searched_layouts(inputs, batches, asked, console)
            chosen = layouts[0].parallel_layout()
        else:
            chosen = planned_in(inputs, batches, asked)
    costs, cap_bytes = inputs.costs, inputs.memory_cap_bytes
    coefficients = costs.of(chosen)
    names, left_out = chosen_strategies(asked, chosen, inputs.options)
    planner = StepPlanner(costs.model, coefficients, chosen, cap_bytes, inputs.options)
    flexible = FlexPlanner(planner, costs.of, flexibility)
    said = inputs_said(inputs, source, table, chosen, known_steps=known_steps, steps=steps, seed=seed)
    console.print(first_line(said, table, chosen, coefficients), markup=False, highlight=False, soft_wrap=True)
    for line in (*filter(None, [unit_line(table)]), *(f"cost: {note}" for note in costs.notes(chosen))):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    with progress_bar() as on_progress:
        evaluation = evaluate_strategies(planner, batches, names, flexible, on_progress=on_progress)
    rows = rows_in_unit([msgspec.to_builtins(result) for result in evaluation.results], table.unit)
    if any(result.feasible for result in evaluation.results):
        console.print(comparison_table(rows, evaluation.best or "", unit=table.unit))
    else:
        for row in rows:
            console.print(f"{row['name']}: not feasible: {row['why']}", markup=False, highlight=False, soft_wrap=True)
    lines = [f"left out of --strategy all: {one.name}: {one.why}" for one in left_out]
    if evaluation.best:
        lines.append(bound_line(evaluation))
    lines += [f"{row['name']}: {row['note']}" for row in rows if row["note"]]
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if json_file:
        content = {
            "version": version("evenload"),
            "inputs": said,
            "strategies": rows,
            "best": evaluation.best,
            "left_out": [msgspec.to_builtins(one) for one in left_out],
        }
        if search_layout:
            content["layouts"] = [msgspec.to_builtins(result) for result in layouts]
        write_output(json_file, msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n")
    if emit_plan:
        plans = [proposal.plan for name in evaluation.proposals for proposal in evaluation.proposals[name]]
        write_output(emit_plan, encode_plan_file(plans))
    if html:
        write_report(html, plan_report(said, rows, evaluation, batches, cap_bytes, table.unit))
    if trace:
        _write_trace(trace, evaluation)
    if evaluation.best is None:
        closest = min(rows, key=lambda row: row["peak_memory_bytes"] or float("inf"))
        hint = "" if search_layout else f"; {layouts_that_fit(inputs, batches, asked)}"
        raise InfeasiblePlanError(f"no strategy fits; the closest: {closest['why']}{hint}")


def _write_trace(path: Path, evaluation: Evaluation) -> None:
    planned = [name for name, proposals in evaluation.proposals.items() if proposals]
    if not planned:
        raise InfeasiblePlanError(f"--trace {path}: no strategy could be planned, so there is no timeline to write")
    proposal = evaluation.proposals[evaluation.best or planned[0]][0]
    timeline = detailed_timeline(proposal.plan, proposal.costs)
    write_chrome_trace(path, {"predicted": timeline}, label_packs(proposal.plan))
