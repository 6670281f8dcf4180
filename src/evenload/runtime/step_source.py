"""`StepSource` plans, reads and collates the steps of this rank while earlier ones train: `data.prefetch_steps` ahead,
in a thread with a process group of its own. Every step carries its states, so a checkpoint holds what was trained."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenload.data.loader import GlobalBatchLoader
from evenload.errors import InvalidPlanError
from evenload.feed.prefetcher import Prefetcher
from evenload.feed.step_maker import PlannedStep, Planner, State, StepMaker
from evenload.planning.layouts.flex_planner import PlannerState
from evenload.runtime.comm.mesh import Mesh, Meshes
from evenload.runtime.replay.rank_packs import Exchange, RankPackTokens, RankStep
from evenload.stepplan.transfer_order import transfer_order
from evenload.types.plan import StepPlan


def prepare_step(
    plan: StepPlan, tokens: Mapping[int, NDArray[np.int32]], mesh: Mesh, exchange: Exchange = "all_gather"
) -> RankStep:
    """Make this rank's part of a step from its replica's tokens. `InvalidPlanError` for another layout or model."""
    if plan.layout.arrangement != mesh.layout:
        planned, ours = plan.layout.describe(), mesh.layout.describe()
        raise InvalidPlanError(f"step {plan.step} is planned for {planned}, this run is {ours}")
    own = None
    if plan.layout.has_replicated_stages:
        own = {action.pack for action in plan.schedules[mesh.dp_rank].ranks[mesh.pp_rank]}
    packs = RankPackTokens(plan, mesh.dp_rank, mesh.context, exchange, mesh.device).collate(tokens, own)
    return RankStep(plan, packs, transfer_order(plan, mesh.dp_rank, mesh.pp_rank, mesh.channels))


def step_maker(
    loader: GlobalBatchLoader, planner: Planner[State], mesh: Mesh, max_pack_tokens: int
) -> StepMaker[State]:
    """Return the maker of steps that all ranks of the job make together."""
    replicas, waiting = lambda layout: layout.replicas(mesh.num_ranks), mesh.watch.waiting
    return StepMaker(loader, planner, replicas=replicas, max_pack_tokens=max_pack_tokens, waiting=waiting)


@dataclass(frozen=True, eq=False)
class PreparedStep:
    """Holds a planned step and this rank's part, ready to run; None where it is idle in the plan's layout."""

    planned: PlannedStep
    step: RankStep | None


def prepared_step(planned: PlannedStep, meshes: Meshes, exchange: Exchange) -> PreparedStep:
    """Prepare a step for its plan's own layout, which need not be the one that runs now."""
    mesh = meshes.of(planned.plan.layout)
    return PreparedStep(planned, None if mesh.is_idle else prepare_step(planned.plan, planned.tokens, mesh, exchange))


class StepSource:
    """Makes the steps of a run, in order.

    Args:
        max_pack_tokens: limit that every plan is checked against.
        to_make: steps to make at most; None = until the data ends.
        of_run: steps of the whole run that are left, also those after it will be stopped: layout decisions use their
            lengths, so that a stopped and resumed run decides like one that was not.
        planner_state: after the step before the first.
    """

    def __init__(
        self,
        loader: GlobalBatchLoader,
        planner: Planner[PlannerState],
        meshes: Meshes,
        exchange: Exchange,
        *,
        max_pack_tokens: int,
        to_make: int | None,
        of_run: int | None,
        planner_state: PlannerState,
    ) -> None:
        maker = step_maker(loader, planner, meshes.start, max_pack_tokens)
        maker.planner_state = planner_state
        self._loader = loader
        made = 0

        def make() -> PreparedStep | None:  # without `self`, so that dropping it ends the thread
            nonlocal made
            planned = None
            if to_make is None or made < to_make:
                planned = maker.next(None if of_run is None else of_run - made)
            if planned is None:
                loader.close()
                return None
            made += 1
            return prepared_step(planned, meshes, exchange)

        self._ahead = Prefetcher(make, loader.config.prefetch_steps, "evenload-prepare")
        self.has_next = self._ahead.has_next
        """Whether another step comes. Waits until it is made; the same on all ranks."""
        self.next = self._ahead.next
        """Returns the next step, None at the end; raises what making it raised."""

    def close(self) -> None:
        """Stop early, at the same step on every rank; a step that is being made is finished, and dropped."""
        self._ahead.close()
        self._loader.close()
