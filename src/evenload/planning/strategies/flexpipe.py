"""Plan by `flexpipe` inside one layout, with which `plan.layouts` plans every step once the layout is chosen.

FlexPipe changes the pipeline, not the packing (§7.1): documents stay whole and run in the micro-batches of `balanced`.
Its options say how the layout is chosen, under `auto` with `plan.layouts`, too.
"""

from typing import Literal

from evenload.errors import ConfigError
from evenload.planning.problem import StrategyOptions
from evenload.planning.strategies.baselines import plan_balanced
from evenload.planning.strategies.strategy import Strategy
from evenload.types.base import require_at_least_one


class FlexOptions(StrategyOptions, tag="flexpipe"):
    """Set how the layout of coming steps is chosen.

    Args:
        known_steps: steps over which the gain of a switch counts, the coming one included; a run reads the lengths of
            so many batches ahead.
        margin: a switch that nothing forces must be faster by this share of the time without it.
        patience_steps: steps in a row at which a switch that nothing forces must have paid; 1 = at once.
        overhead_s: fixed seconds of a switch on top of its transfers.
        finalists: layouts that are planned and simulated next to the current one, at most; declared layouts with
            virtual stages come on top.
        memory_plans: how a layout may hold a batch for which it lacks memory, the faster of them: "documents" that
            recompute or offload in all stages, "layers" that recompute for all documents (FlexPipe's O_plan; under
            `flexpipe`, not under `auto`). For `plan.options.policy` "choose" alone.
        least_depth_only: search only the least depth that fits, as published. No matter where layouts are given.
        part_pipelines: also search stages with different numbers of devices, where a depth does not divide them. No
            matter where layouts are given, or under a strategy that does not deal packs to them.
        follow_measured: measured step times and switches of a run correct the predicted ones of coming decisions.
        most_layouts: numbers of devices of stages that a run under `flexpipe` may take where it declares no layouts,
            with any layers in the stages; those in which it starts included.
        most_groups: process groups that they may need on top of those of the first.

    Raises:
        ConfigError: a value that nothing can satisfy.
    """

    known_steps: int = 8
    margin: float = 0.02
    patience_steps: int = 2
    overhead_s: float = 0.0
    finalists: int = 3
    memory_plans: tuple[Literal["documents", "layers"], ...] = ("documents", "layers")
    least_depth_only: bool = False
    part_pipelines: bool = True
    follow_measured: bool = True
    most_layouts: int = 8
    most_groups: int = 256

    def __post_init__(self) -> None:
        require_at_least_one(
            "plan options: flexpipe.", self, "known_steps", "finalists", "patience_steps", "most_groups"
        )
        for field, low in (("overhead_s", 0.0), ("most_layouts", 2)):
            if getattr(self, field) < low:
                raise ConfigError(f"plan options: flexpipe.{field} is {getattr(self, field)}, must be at least {low}")
        if not 0 <= self.margin < 1:
            raise ConfigError(f"plan options: flexpipe.margin is {self.margin}, must be in [0, 1)")


FLEXPIPE = Strategy(
    name="flexpipe",
    description="whole documents, packs of equal predicted seconds; the pipeline's depth follows the batch",
    plan=plan_balanced,
    options=FlexOptions,
    changes_layout=True,
    ignores_memory=True,
    runs_replicated_stages=True,
)
