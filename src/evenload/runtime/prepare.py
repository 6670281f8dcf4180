"""`prepare_step`: all that a rank must know to run a step, worked out before the step.

Which rows it computes, their tokens, how they attend, and the order of its transfers. Another thread may prepare a step
while the one before runs (`step_source`); walking a prepared step (`executor`) plans and simulates nothing.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from evenload.errors import InvalidPlanError
from evenload.runtime.comm.mesh import Mesh
from evenload.runtime.replay.rank_packs import Exchange, RankPacks, RankStep
from evenload.stepplan.transfer_order import transfer_order
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
