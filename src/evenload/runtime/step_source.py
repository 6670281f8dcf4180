"""`StepSource`: steps planned, read and collated for this rank, made while earlier ones train: `data.prefetch_steps`
ahead, by a thread on a process group of its own. States travel with their step: a checkpoint holds what was trained,
not what was made ahead."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenload.data.loader import GlobalBatchLoader
from evenload.errors import InvalidPlanError
from evenload.feed.read_ahead import ReadAhead
from evenload.feed.step_maker import PlannedStep, StepMaker
from evenload.plan.layouts.flex_planner import FlexPlanner, FlexRunPlanner, PlannerState
from evenload.plan.layouts.measured_layouts import LayoutTrack, MeasuredLayouts
from evenload.plan.planner import StepPlanner
from evenload.plan.strategies.registry import require_trainable
from evenload.runtime.comm.mesh import Mesh, Meshes
from evenload.runtime.replay.rank_packs import Exchange, RankPacks, RankStep
from evenload.stepplan.transfer_order import transfer_order
from evenload.types.layout import ParallelLayout
from evenload.types.plan import StepPlan


def prepare_step(
    plan: StepPlan, tokens: Mapping[int, NDArray[np.int32]], mesh: Mesh, exchange: Exchange = "all_gather"
) -> RankStep:
    """This rank's part of a step, ready to run once, from the tokens of every document of its replica.
    `InvalidPlanError` for a plan of another layout, or one that this model cannot run."""
    if plan.layout.arrangement != mesh.layout:
        raise InvalidPlanError(
            f"step {plan.step} is planned for {plan.layout.describe()}, this run is {mesh.layout.describe()}"
        )
    own = None
    if plan.layout.has_wide_stages:
        own = {action.pack for action in plan.schedules[mesh.dp_rank].ranks[mesh.pp_rank]}
    packs = RankPacks(plan, mesh.dp_rank, mesh.context, exchange, mesh.device).collate(tokens, own)
    return RankStep(plan, packs, transfer_order(plan, mesh.dp_rank, mesh.pp_rank, mesh.channels))


@dataclass(frozen=True, eq=False)
class PreparedStep:
    """One step: what was planned, and this rank's part, ready to run; None where it is idle in the plan's layout."""

    planned: PlannedStep
    step: RankStep | None

    @functools.cached_property
    def shares_packs(self) -> bool:
        """Replicas share packs of the step (DP-Merge)."""
        return replicas_share_packs(self.planned.plan)


def replicas_share_packs(plan: StepPlan) -> bool:
    """Replicas share packs of a plan (DP-Merge)."""
    packs = (pack for part in plan.pack_plans for pack in part.backward)
    return any(piece.cp > plan.layout.cp for pack in packs for piece in pack.slices)


def prepared_step(planned: PlannedStep, meshes: Meshes, exchange: Exchange) -> PreparedStep:
    """For the plan's own layout, which need not be the one that runs now."""
    mesh = meshes.of(planned.plan.layout)
    return PreparedStep(planned, None if mesh.is_idle else prepare_step(planned.plan, planned.tokens, mesh, exchange))


@dataclass(frozen=True, kw_only=True)
class StepsLeft:
    """How many steps come; None = until the data ends.

    Args:
        to_make: at most.
        of_run: of the whole run, also those that are not made because it will be stopped: decisions use their
            lengths, so that a stopped and resumed run takes those of one that was not.
    """

    to_make: int | None
    of_run: int | None

    @classmethod
    def after(cls, steps_done: int, last_step: int | None, run_steps: int | None) -> "StepsLeft":
        """Count the steps of a run of `run_steps` in all, of which those up to `last_step` are made."""
        to_make, of_run = (None if end is None else max(0, end - steps_done) for end in (last_step, run_steps))
        return cls(to_make=to_make, of_run=of_run)


class StepSource:
    """The steps of a run, in order.

    Args:
        planner_state: after the step before the first.
        layouts: what rank 0 knows of layouts that ran; None = decisions do not follow it.

    Raises:
        ConfigError: a strategy that the runtime cannot run.
    """

    def __init__(
        self,
        loader: GlobalBatchLoader,
        planner: StepPlanner | FlexPlanner,
        strategy: str,
        meshes: Meshes,
        exchange: Exchange,
        *,
        left: StepsLeft,
        planner_state: PlannerState,
        layouts: LayoutTrack | None = None,
    ) -> None:
        options = planner.start.options if isinstance(planner, FlexPlanner) else planner.options
        for layout in meshes.layouts:
            require_trainable(strategy, layout, options, loader.config.max_document_tokens)
        assert options.max_pack_tokens is not None, "`run_planner` decides it"
        watch, num_ranks = meshes.start.watch, meshes.start.num_ranks
        maker = StepMaker(
            loader,
            FlexRunPlanner(
                planner, strategy, (lambda step: MeasuredLayouts()) if layouts is None else layouts.for_step
            ),
            replicas=lambda layout: layout.replicas(num_ranks),
            max_pack_tokens=options.max_pack_tokens,
            waiting=watch.waiting,
        )
        maker.planner_state = planner_state
        self._loader = loader
        made = 0

        def make() -> PreparedStep | None:  # without `self`, so that dropping it ends the thread
            nonlocal made
            is_asked_for = left.to_make is None or made < left.to_make
            planned = maker.next(None if left.of_run is None else left.of_run - made) if is_asked_for else None
            if planned is None:
                loader.close()
                return None
            made += 1
            return prepared_step(planned, meshes, exchange)

        self._ahead = ReadAhead(make, loader.config.prefetch_steps, "evenload-prepare")

    def close(self) -> None:
        """The run stops early: what is being made ahead is made, and dropped. At the same step on every rank."""
        self._ahead.close()
        self._loader.close()

    def coming_layout(self) -> ParallelLayout | None:
        """Return the layout of the step that `next` would give, if it is made by now. Never waits."""
        coming = self._ahead.peek()
        return None if coming is None else coming.planned.plan.layout

    def has_next(self) -> bool:
        """Whether another step comes. Waits until it is made; the same on all ranks."""
        return self._ahead.has_next()

    def next(self) -> PreparedStep | None:
        """The next step; None at the end. Raises what making it raised."""
        return self._ahead.next()
