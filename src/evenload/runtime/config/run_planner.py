"""The planner of a configured run."""

import msgspec

from evenload.cost.coefficients import CostCoefficients
from evenload.plan.planner import StepPlanner
from evenload.plan.problem.options import PlanOptions
from evenload.plan.strategies.merge_default import decide_dp_merge
from evenload.runtime.config.train_config import TrainConfig
from evenload.types.layout import ParallelLayout
from evenload.types.model import ModelSpec


def run_options(config: TrainConfig, layout: ParallelLayout, coefficients: CostCoefficients) -> PlanOptions:
    """`plan.options` with what the run decides where they leave it open: the limit of packs, and DP-Merge."""
    options = msgspec.structs.replace(config.plan.options, max_pack_tokens=config.max_pack_tokens)
    return decide_dp_merge(options, config.plan.strategy, layout, coefficients)[0]


def run_planner(
    config: TrainConfig,
    model: ModelSpec,
    layout: ParallelLayout,
    coefficients: CostCoefficients,
    memory_cap_bytes: int,
) -> StepPlanner:
    """As training plans; `memory_cap_bytes` is of one process."""
    return StepPlanner(model, coefficients, layout, memory_cap_bytes, run_options(config, layout, coefficients))
