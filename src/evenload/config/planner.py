"""Make the planner of a configured run, for its layout or for all that it may take, and find out its main memory."""

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from evenload.config.train_config import PlanConfig, TrainConfig
from evenload.cost.coefficients import CostCoefficients
from evenload.cost.memory import HostMemory, host_memory_of_node
from evenload.cost.validity import fill_between_layouts
from evenload.planning.layouts.flex_planner import FlexPlanner
from evenload.planning.layouts.moves import SwitchPieces
from evenload.planning.planner import StepPlanner
from evenload.planning.problem import PlanOptions
from evenload.planning.strategies.registry import decide_dp_merge
from evenload.types.layout import ParallelLayout
from evenload.types.model import ModelSpec


def options_of_run(config: TrainConfig, layout: ParallelLayout, coefficients: CostCoefficients) -> PlanOptions:
    """Return `plan.options`, completed by what the run decides: the limit of packs, and DP-Merge."""
    options = msgspec.structs.replace(config.plan.options, max_pack_tokens=config.max_pack_tokens)
    return decide_dp_merge(options, config.plan.strategy, layout, coefficients)[0]


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
    options = options_of_run(config, layout, coefficients)
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
        options_of=lambda layout, coefficients: options_of_run(config, layout, coefficients),
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
