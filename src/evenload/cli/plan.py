"""`evenload plan`: which strategy is how fast on the user's lengths, model and cluster. Needs no GPU."""

from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console

from evenload.cli.layout_option import parse_layout
from evenload.cli.layout_table import layout_table
from evenload.cli.output_file import require_writable, write_output
from evenload.cli.plan_costs import plan_costs
from evenload.cli.plan_report import plan_report
from evenload.cli.progress_bar import progress_bar
from evenload.cost.coefficients import CostCoefficients
from evenload.data.lengths import read_lengths
from evenload.errors import ConfigError, InfeasiblePlanError
from evenload.plan.default_layout import default_layout, usable_bytes
from evenload.plan.detailed_timeline import detailed_timeline
from evenload.plan.evaluate import Evaluation, evaluate_strategies
from evenload.plan.flex_planner import FlexPlanner
from evenload.plan.fmop import FlexOptions
from evenload.plan.global_batch import sample_global_batches
from evenload.plan.layout_search import LayoutResult, layout_sizes, search_layouts
from evenload.plan.options import PlanOptions
from evenload.plan.plan_file import encode_plan_file
from evenload.plan.planner import StepPlanner
from evenload.plan.stage_layers import balanced_layout
from evenload.plan.strategies import FLAT_STRATEGIES, SOLVER_STRATEGIES, STRATEGIES
from evenload.report.chrome_trace import write_chrome_trace
from evenload.report.html import write_report
from evenload.report.pack_label import label_packs
from evenload.report.table import comparison_table
from evenload.report.units import format_seconds
from evenload.types.cluster_catalog import cluster_from
from evenload.types.layout import ParallelLayout
from evenload.types.model_catalog import model_from

DEFAULT_DOCUMENTS = 512
"""Documents of a global batch when neither --documents nor --tokens is given."""
STRATEGY_HELP = (
    "'all', or names with commas: " + ", ".join(STRATEGIES) + ". 'all' leaves out "
    f"{', '.join(SOLVER_STRATEGIES)}, which takes its solver's time limit."
)
PIPED_WIDTH = 220
"""Columns of the table when the output is not a terminal."""


def plan_command(
    lengths: Annotated[
        str,
        typer.Argument(metavar="LENGTHS", help="Document lengths: .npy, .npy.gz, .txt (one a line), or any source."),
    ],
    model: Annotated[str, typer.Option(help="Built-in name (llama-7b, qwen2.5-0.5b, ...) or an HF config.json.")],
    cluster: Annotated[str, typer.Option(help="Built-in name (h100x32, a100x8, ...) or a TOML file.")],
    layout: Annotated[
        str | None,
        typer.Option(
            help="For example dp=4,pp=8. Also virtual=2. Default: the shallowest that fits. Stages get layers by cost."
        ),
    ] = None,
    documents: Annotated[
        int | None, typer.Option(help=f"Documents of a global batch (default {DEFAULT_DOCUMENTS}).")
    ] = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens of a global batch, instead of --documents.")] = None,
    context: Annotated[
        int, typer.Option(help="Longest document trained whole, and the most tokens of a pack.")
    ] = 131_072,
    overlong: Annotated[
        Literal["error", "split", "truncate", "drop"], typer.Option(help="What happens to longer documents.")
    ] = "error",
    strategy: Annotated[str, typer.Option(help=STRATEGY_HELP)] = "all",
    dp_merge: Annotated[
        bool, typer.Option(help="Let replicas share documents too long for one of them (slimpack), where faster.")
    ] = True,
    policy: Annotated[
        Literal["choose", "replay", "recompute", "offload"],
        typer.Option(
            help="What documents keep between forward and backward. 'choose': all of it where that fits memory, else "
            "some are recomputed or offloaded."
        ),
    ] = "choose",
    window: Annotated[int, typer.Option(help="Global batches over which fixed_greedy and fixed_exact pack.")] = 1,
    max_delay_steps: Annotated[
        int, typer.Option(help="Most steps by which wlb and fixed_* with --window put a document off.")
    ] = 8,
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

    Draws global batches from the table of lengths, plans each with every strategy, simulates the pipeline over
    time with its memory, and shows who is fastest within memory.

    [bold]Example[/bold]: evenload plan examples/lengths/github_dirs.npy.gz --model llama-7b --cluster h100x32
    --layout dp=4,pp=8 --context 16384 --overlong truncate --documents 512

    Exit code: 0 ok, 2 wrong input, 3 no strategy fits.
    """
    if search_layout and layout:
        raise ConfigError(f"--search-layout looks for the layout, --layout {layout} gives it; leave one out")
    if documents is not None and tokens is not None:
        raise ConfigError(f"--documents {documents} and --tokens {tokens} exclude each other; give one")
    machines = cluster_from(cluster)
    costs = plan_costs(cost, model_from(model), machines)
    spec = costs.model
    table = read_lengths(lengths)
    batches = sample_global_batches(
        table,
        steps=steps,
        seed=seed,
        num_documents=DEFAULT_DOCUMENTS if documents is None and tokens is None else documents,
        num_tokens=tokens,
        context=context,
        overlong=overlong,
    )
    cap_bytes = usable_bytes(machines)
    options = PlanOptions(
        max_pack_tokens=context,
        policy=policy,
        dp_merge=dp_merge,
        window=window,
        max_delay_steps=max_delay_steps,
    )
    console = Console() if Console().is_terminal else Console(width=PIPED_WIDTH)
    layouts: tuple[LayoutResult, ...] = ()
    if search_layout:
        with progress_bar() as on_progress:
            layouts = search_layouts(
                spec,
                machines,
                batches,
                costs.of,
                strategy="auto" if strategy == "all" or "," in strategy else strategy,
                options=options,
                on_progress=on_progress,
            )
        console.print(layout_table(layouts, console.width))
        if not layouts[0].feasible:
            raise InfeasiblePlanError(f"no layout of {cluster} fits; the closest: {layouts[0].why}")
        chosen = layouts[0].parallel_layout()
        coefficients = costs.of(chosen)
    else:
        sizes = (
            parse_layout(layout, spec.num_layers, machines.num_devices) if layout else default_layout(spec, machines)
        )
        coefficients = costs.of(sizes)  # also checks that the layout fits the cluster
        chosen = balanced_layout(
            spec,
            coefficients,
            [document.num_tokens for batch in batches for document in batch.documents],
            **layout_sizes(sizes),
            num_steps=len(batches),
            memory_bytes=cap_bytes,
        )
    planner = StepPlanner(spec, coefficients, chosen, cap_bytes, options)
    flexible = FlexPlanner(
        planner,
        costs.of,
        FlexOptions(known_steps=known_steps),
    )
    inputs: dict[str, Any] = {
        "lengths": lengths,
        "model": model,
        "cluster": cluster,
        "layout": layout_sizes(chosen),
        "stage_layers": chosen.stage_counts,
        "devices": machines.num_devices,
        "documents": documents if tokens is not None else documents or DEFAULT_DOCUMENTS,
        "tokens": tokens,
        "context": context,
        "overlong": overlong,
        "policy": policy,
        "dp_merge": dp_merge,
        "window": window,
        "max_delay_steps": max_delay_steps,
        "known_steps": known_steps,
        "steps": steps,
        "seed": seed,
        "cost": str(cost) if cost else "analytic",
        "memory_cap_bytes": cap_bytes,
    }
    console.print(_first_line(inputs, table, chosen, coefficients), markup=False, highlight=False, soft_wrap=True)
    for note in costs.notes(chosen):
        console.print(f"cost: {note}", markup=False, highlight=False, soft_wrap=True)
    with progress_bar() as on_progress:
        evaluation = evaluate_strategies(
            planner, batches, _strategy_names(strategy, chosen), flexible, on_progress=on_progress
        )
    rows = [msgspec.to_builtins(result) for result in evaluation.results]
    if any(result.feasible for result in evaluation.results):
        console.print(comparison_table(rows, evaluation.best or ""))
    else:
        for result in evaluation.results:
            console.print(f"{result.name}: not feasible: {result.why}", markup=False, highlight=False, soft_wrap=True)
    if evaluation.best:
        console.print(_bound_line(evaluation), markup=False, highlight=False, soft_wrap=True)
    for result in evaluation.results:
        if result.note:
            console.print(f"{result.name}: {result.note}", markup=False, highlight=False)
    if json_file:
        content = {"version": version("evenload"), "inputs": inputs, "strategies": rows, "best": evaluation.best}
        if search_layout:
            content["layouts"] = [msgspec.to_builtins(result) for result in layouts]
        write_output(json_file, msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n")
    if emit_plan:
        plans = [proposal.plan for name in evaluation.proposals for proposal in evaluation.proposals[name]]
        write_output(emit_plan, encode_plan_file(plans))
    if html:
        require_writable(html)
        write_report(html, plan_report(inputs, rows, evaluation, batches, cap_bytes))
    if trace:
        _write_trace(trace, evaluation)
    if evaluation.best is None:
        closest = min(evaluation.results, key=lambda result: result.peak_memory_bytes or float("inf"))
        raise InfeasiblePlanError(f"no strategy fits; the closest: {closest.why}")


def _strategy_names(text: str, layout: ParallelLayout) -> tuple[str, ...]:
    if text == "all":
        apart = (*SOLVER_STRATEGIES, *(FLAT_STRATEGIES if layout.pp > 1 else ()))
        return tuple(name for name in STRATEGIES if name not in apart)
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise ConfigError(f"--strategy '{text}' names no strategy; use 'all' or some of {', '.join(STRATEGIES)}")
    return names


def _first_line(
    inputs: dict[str, Any], table: NDArray[np.int64], layout: ParallelLayout, coefficients: CostCoefficients
) -> str:
    """All inputs on one line, so that a copied output can be repeated."""
    size = f"{inputs['tokens']:,} tokens" if inputs["tokens"] else f"{inputs['documents']:,} documents"
    unused = inputs["devices"] - layout.world_size
    devices = f" ({unused} of {inputs['devices']} devices unused)" if unused else ""
    return (
        f"evenload {version('evenload')} plan: {inputs['lengths']} ({len(table):,} documents, median "
        f"{int(np.median(table)):,}, longest {int(table.max()):,} tokens), model {inputs['model']}, cluster "
        f"{inputs['cluster']}, layout {layout.describe()}{devices}, {size} a step, {inputs['steps']} steps, context "
        f"{inputs['context']:,}, overlong {inputs['overlong']}, seed {inputs['seed']}, {coefficients.source} costs"
    )


def _bound_line(evaluation: Evaluation) -> str:
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


def _write_trace(path: Path, evaluation: Evaluation) -> None:
    planned = [name for name, proposals in evaluation.proposals.items() if proposals]
    if not planned:
        raise InfeasiblePlanError(f"--trace {path}: no strategy could be planned, so there is no timeline to write")
    proposal = evaluation.proposals[evaluation.best or planned[0]][0]
    require_writable(path)
    timeline = detailed_timeline(proposal.plan, proposal.costs)
    write_chrome_trace(path, {"predicted": timeline}, label_packs(proposal.plan))
