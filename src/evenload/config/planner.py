"""List the layouts that a run may take (`layouts_of`), fit a run to fewer ranks (`fitted_config`), refuse settings of
the optimizer that do not go with them (`require_optimizer`), and make the planner of a run for its layout or for all
that it may take; find out its main memory."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from evenload.config.train_config import ParallelConfig, PlanConfig, TrainConfig, layout_of
from evenload.cost.coefficients import CostCoefficients
from evenload.cost.memory import HostMemory, host_memory_of_node
from evenload.cost.validity import fill_between_layouts
from evenload.errors import ConfigError
from evenload.planning.layouts.flex_planner import FlexPlanner
from evenload.planning.layouts.layout_candidates import enumerated_layouts
from evenload.planning.layouts.moves import SwitchPieces
from evenload.planning.planner import StepPlanner
from evenload.planning.problem import CHOOSE, PlanOptions
from evenload.planning.strategies.flexpipe import FlexOptions
from evenload.planning.strategies.registry import decide_dp_merge, require_trainable, strategy_named
from evenload.schedule.registry import SCHEDULES
from evenload.types.layout import ParallelLayout, read_layout_text
from evenload.types.model import ModelSpec
from evenload.types.text import counted


def layouts_of(config: TrainConfig, num_layers: int) -> tuple[ParallelLayout, ...]:
    """List the layouts that a run may take, each once: that of `[parallel]`, in which it starts and which gives the
    number of processes, and those of `plan.layouts`, or, under `flexpipe` without them, some of the same processes,
    whose stages may have any layers (`layers_move`).
    Raises `ConfigError`: as `layout_of` and `resolved_layout`; a layout needs more processes than `[parallel]` starts
    or is named twice; or fifo channels with stages of different numbers of devices."""
    start = layout_of(config.parallel, num_layers)
    layouts = [start]
    for text in config.plan.layouts:
        layout = resolved_layout(text, start, num_layers)
        if layout.world_size > start.world_size:
            raise ConfigError(
                f"plan.layouts: '{text}' needs {counted(layout.world_size, 'process')}, [parallel] "
                f"({start.describe()}) starts {start.world_size}; a run starts in its largest layout: make that "
                "[parallel]'s"
            )
        if layout in layouts[1:]:
            raise ConfigError(f"plan.layouts: '{text}' is the same layout as an entry before it ({layout.describe()})")
        if layout != start:
            layouts.append(layout)
    if layers_move(config.plan):
        options = config.plan.options.own(FlexOptions)
        schedule = config.plan.options.schedule
        deals_packs = options.part_pipelines and config.parallel.channels != "fifo"
        deals_packs = deals_packs and (schedule == CHOOSE or SCHEDULES.named(schedule).runs_replicated_stages)
        layouts += enumerated_layouts(start, options.most_layouts, options.most_groups, part_pipelines=deals_packs)
    for layout in layouts:
        if layout.has_replicated_stages and config.parallel.channels == "fifo":
            raise ConfigError(
                f"layout {layout.describe()} has stages with different numbers of devices, and parallel.channels = "
                '"fifo" gives every pair of ranks one queue; that is not tested with them: leave one of both out'
            )
    return tuple(layouts)


def layers_move(plan: PlanConfig) -> bool:
    """Return whether a run cuts stages anew for every batch: the strategy changes the layout, and none is declared."""
    return not plan.layouts and strategy_named(plan.strategy).changes_layout


def resolved_layout(text: str, start: ParallelLayout, num_layers: int) -> ParallelLayout:
    """Read an entry of `plan.layouts`; without `dp` it has as many replicas as the ranks of `start` suffice for.
    Raises `ConfigError`: it cannot be read, changes cp or tp of `start`, or does not hold the model's layers."""
    written = read_layout_text(text)
    for axis in ("cp", "tp"):
        if written.sizes.get(axis, getattr(start, axis)) != getattr(start, axis):
            raise ConfigError(
                f"plan.layouts: '{text}' has {axis}={written.sizes[axis]}, [parallel] has "
                f"{axis}={getattr(start, axis)}; only dp, pp, virtual and the layers of stages may change while a "
                "run trains"
            )
    per_replica = written.size("pp") * start.cp * start.tp
    # As many replicas as there are processes for; those that are left over are idle.
    replicas = max(1, start.world_size // per_replica) if written.devices is None else 1
    return written.layout(num_layers, **{"cp": start.cp, "tp": start.tp, "dp": replicas})


def shrunk_parallel(
    parallel: ParallelConfig,
    num_layers: int,
    num_ranks: int,
    refusal: Callable[[ParallelConfig], str] = lambda parallel: "",
) -> ParallelConfig:
    """Choose `[parallel]` of a run that has so many ranks left; itself where they are enough.

    Of the layouts with as many tensor- and context-parallel ranks as before, one that uses most ranks; of these the one
    whose number of stages is nearest to before, and then the deeper one. Its stages have equally many ranks. `refusal`
    returns why no run starts in a layout, or "". Raises `ConfigError`: no run starts in any layout of so many ranks.
    """
    inner = parallel.cp * parallel.tp
    if num_ranks >= inner * parallel.dp * sum(parallel.stage_devices or [1] * parallel.pp):
        return parallel
    if num_ranks < inner:
        raise ConfigError(
            f"{counted(num_ranks, 'rank')} left, but parallel.cp x parallel.tp is {inner}: what they share is not "
            "divided anew while a run goes on; start it again with smaller ones, from its last checkpoint"
        )
    free, even = num_ranks // inner, {"virtual": 1, "stage_layers": None, "stage_devices": None}
    keeps_stages = parallel.pp if parallel.stage_devices is None else 0
    choices = [
        msgspec.structs.replace(parallel, pp=pp, dp=free // pp, **({} if pp == keeps_stages else even))
        for pp in range(1, min(free, num_layers) + 1)
    ]
    choices.sort(key=lambda one: (one.pp * one.dp, -abs(one.pp - parallel.pp), one.pp), reverse=True)
    for one in choices:
        if not refusal(one):
            return one
    raise ConfigError(
        f"{counted(num_ranks, 'rank')} left, and no run starts in a layout of so many: {refusal(choices[0])}; start it "
        "again with other settings, from its last checkpoint"
    )


def fitted_config(config: TrainConfig, num_layers: int, num_ranks: int) -> TrainConfig:
    """Fit the settings of a run to so many ranks; the same object where they are enough.

    The layout is that of `shrunk_parallel`; entries of `plan.layouts` that still fit stay. `train.cost_file`, whose
    costs are of another layout, is left out. Raises `ConfigError`: the strategy trains in no layout small enough that
    has as many `cp` and `tp` ranks, or `plan.layouts` is wrong.
    """
    if num_ranks >= layout_of(config.parallel, num_layers).world_size:
        return config
    parallel = shrunk_parallel(
        config.parallel, num_layers, num_ranks, lambda one: _refusal(config.plan, one, num_layers)
    )
    fitted = layout_of(parallel, num_layers)
    kept: dict[ParallelLayout, str] = {}
    for text in config.plan.layouts:
        layout = resolved_layout(text, fitted, num_layers)
        if layout.world_size <= fitted.world_size and layout != fitted:
            kept.setdefault(layout, text)
    return msgspec.structs.replace(
        config,
        parallel=parallel,
        train=msgspec.structs.replace(config.train, cost_file=None),
        plan=msgspec.structs.replace(config.plan, layouts=tuple(kept.values())),
    )


def _refusal(plan: PlanConfig, parallel: ParallelConfig, num_layers: int) -> str:
    """Return why the strategy does not train in a layout; "" = it does."""
    try:
        require_trainable(plan.strategy, layout_of(parallel, num_layers), plan.options)
    except ConfigError as error:
        return str(error)
    return ""


def require_optimizer(config: TrainConfig, model: ModelSpec, num_layouts: int) -> None:
    """Raise `ConfigError` for what no test trains together with the optimizer's settings."""
    optimizer, plan, start = config.optimizer, config.plan, layout_of(config.parallel, model.num_layers)
    is_muon, asked = optimizer.name == "muon", (plan.strategy, plan.options.micro_batches)
    changes = {
        "the layout may change while the run trains (plan.layouts, flexpipe), which moves AdamW's fp32 state alone": (
            num_layouts > 1
        )
    }
    untested = changes | {
        "adapters (model.lora) are trained, which is not tested": config.model.lora is not None,
        f"{model.name} has experts, which is not tested": model.num_experts > 0,
    }
    of_adamw = {"optimizer.name is 'muon'": is_muon, **untested}
    not_whole = {
        f"parallel.tp is {start.tp}: it orthogonalises whole matrices, of which ranks of a tensor-parallel group hold "
        "parts": start.tp > 1
    }
    no_halves = {f"model.dtype is '{config.model.dtype}'; set 'bfloat16'": config.model.dtype != "bfloat16"}
    not_one_pack = {
        "plan.strategy is '{}' and plan.options.micro_batches {}, so a step may have several packs; set 'balanced' and "
        "1".format(*asked): asked != ("balanced", 1),
        f"[parallel] is {start.describe()}; use dp alone": start.world_size > start.dp or start.num_stages > 1,
        "train.on_nonfinite is 'skip', but weights change before a step is known to be finite; set 'stop'": (
            config.train.on_nonfinite == "skip"
        ),
    }
    last = start.pp - 1
    not_offloaded = changes | {
        "optimizer.name is 'muon', whose state is not updated a few elements at a time": is_muon,
        "optimizer.in_backward is true, whose order of updates is another": optimizer.in_backward,
        f"[parallel] ({start.describe()}) has stages 0 to {last}": not all(
            0 <= stage <= last for stage in optimizer.offload_stages
        ),
    }
    for setting, is_chosen, why_not in (
        (f"train.ema_decay is {config.train.ema_decay}", config.train.ema_decay is not None, changes),
        ("optimizer.name is 'muon'", is_muon, not_whole | untested),
        ("optimizer.moments is 'bfloat16'", optimizer.moments == "bfloat16", no_halves | of_adamw),
        ("optimizer.in_backward is true", optimizer.in_backward, not_one_pack | of_adamw),
        (
            f"optimizer.offload_stages is {list(optimizer.offload_stages)}",
            bool(optimizer.offload_stages),
            not_offloaded,
        ),
    ):
        if why := next((why for why, is_set in why_not.items() if is_set and is_chosen), ""):
            raise ConfigError(f"{setting}, and {why}; leave one of both out")


def options_of_run(
    config: TrainConfig, model: ModelSpec, layout: ParallelLayout, coefficients: CostCoefficients
) -> PlanOptions:
    """Return `plan.options`, completed by what the run decides: the limit of packs, and DP-Merge."""
    options = msgspec.structs.replace(config.plan.options, max_pack_tokens=config.max_pack_tokens)
    return decide_dp_merge(options, config.plan.strategy, model, layout, coefficients)[0]


def host_memory_of_run(plan: PlanConfig, num_ranks: int) -> HostMemory:
    """Return what a machine of so many ranks offers for offloading, by `plan.host_memory_bytes` or its memory."""
    return host_memory_of_node(num_ranks, plan.host_memory_bytes or machine_memory_bytes())


def make_planner(
    config: TrainConfig,
    model: ModelSpec,
    layout: ParallelLayout,
    coefficients: CostCoefficients,
    memory_cap_bytes: int,
    ranks_per_machine: int | None = None,
) -> StepPlanner:
    """Make the planner of a run in one layout, for processes of `memory_cap_bytes`; `ranks_per_machine` (None = all
    of the layout) share a machine's memory for what they offload."""
    options = options_of_run(config, model, layout, coefficients)
    host = host_memory_of_run(config.plan, ranks_per_machine or layout.world_size)
    return StepPlanner(model, coefficients, layout, memory_cap_bytes, options, host=host)


def make_flex_planner(
    config: TrainConfig, planner: StepPlanner, layouts: Sequence[ParallelLayout], moved: SwitchPieces | None = None
) -> FlexPlanner:
    """Make the planner of a run whose layout may change between steps, from that of the layout in which it starts; its
    switches move `moved`, or the model's units. `ConfigError`: no link was measured, so other layouts have no price."""
    # Links of all processes: a switch to a smaller layout crosses some that this layout does not use.
    completed = fill_between_layouts(planner.costs.coefficients, planner.layout)[0]
    return FlexPlanner(
        planner,
        lambda layout: completed,
        strategy=config.plan.strategy,
        layouts=layouts,
        layers_move=layers_move(config.plan),
        options_of=lambda layout, coefficients: options_of_run(config, planner.costs.model, layout, coefficients),
        moved=moved,
    )


_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Of cgroup v2 and v1; "max" or a huge number where there is none."""


def process_memory_bytes(processes: int) -> int:
    """Return what one of so many processes of a run may hold: a fifth is for libraries and the operating system."""
    return int(machine_memory_bytes() * 0.8 / processes)


def machine_memory_bytes() -> int:
    """Return the memory of the machine, or of the container where that is limited."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in _LIMITS:
        text = limit.read_text().strip() if limit.is_file() else "max"
        if text.isdigit():
            total = min(total, int(text))
    return total
