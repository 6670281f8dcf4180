"""Steps on ranks of different speeds: what a clock would show of a plan, and what a plan takes in truth."""

from dataclasses import replace
from itertools import product

import numpy as np

from evenload.cost.speed_costs import SpeedCosts
from evenload.plan.planner import StepPlanner
from evenload.simulate.simulate import simulate
from evenload.stepplan.plan_tasks import timed_tasks
from evenload.stepplan.validate_groups import block_of
from evenload.types.pipeline import action_columns
from evenload.types.plan import StepPlan
from evenload.types.rank_speeds import RankSpeeds
from evenload.types.replica_block import ReplicaBlock
from evenload.types.timeline import KINDS, Timeline


def factor_of(plan: StepPlan, speeds: RankSpeeds | None, stage: int, block: ReplicaBlock) -> float:
    """On a stage's packs that these replicas share."""
    if speeds is None:
        return 1.0
    return speeds.block_factors(block)[plan.layout.stage_to_rank[stage]]


def action_seconds(plan: StepPlan, dp_rank: int, kind: str, stage: int, pack: int, true: RankSpeeds) -> float:
    """What an action takes on ranks of these speeds; the costs are right but for them."""
    packs, times = plan.pack_plans[dp_rank], plan.times[dp_rank]
    listed = packs.forward if kind == "F" else packs.backward
    rows = {"F": times.forward_s, "B": times.backward_s, "I": times.input_s, "W": times.weight_s}[kind]
    block = block_of(plan, dp_rank, listed[pack])
    planned, really = (factor_of(plan, speeds, stage, block) for speeds in (plan.speeds, true))
    return rows[pack][stage] / planned * really


def clocked(
    plan: StepPlan, true: RankSpeeds, noise: np.random.Generator | None = None, spread: float = 0.0
) -> Timeline:
    """A measured timeline: every rank's actions one after the other."""
    rows = []
    for dp_rank, schedule in enumerate(plan.schedules):
        for rank, actions in enumerate(schedule.ranks):
            now_s = 0.0
            for action in actions:
                seconds = action_seconds(plan, dp_rank, action.kind, action.stage, action.pack, true)
                seconds *= 1.0 if noise is None else float(np.exp(noise.normal(0.0, spread)))
                rows.append(
                    (dp_rank, rank, action.stage, KINDS.index(action.kind), action.pack, now_s, now_s + seconds)
                )
                now_s += seconds
    columns = list(zip(*rows, strict=True)) if rows else [()] * 7
    places = [np.array(column, np.int32) for column in columns[:5]]
    return Timeline(
        dp_rank=places[0],
        rank=places[1],
        stage=places[2],
        kind=places[3].astype(np.uint8),
        pack=places[4],
        start_s=np.array(columns[5], np.float64),
        end_s=np.array(columns[6], np.float64),
        step_time_s=max(columns[6], default=0.0),
        memory_dp_rank=np.empty(0, np.int32),
        memory_rank=np.empty(0, np.int32),
        memory_time_s=np.empty(0),
        memory_bytes=np.empty(0, np.int64),
    )


def true_makespan_s(plan: StepPlan, true: RankSpeeds) -> float:
    """The slowest replica's simulated time on ranks of these speeds."""
    ends = []
    for dp_rank, schedule in enumerate(plan.schedules):
        tasks = timed_tasks(plan, dp_rank)
        packs = plan.pack_plans[dp_rank]
        scale = [
            np.array(
                [
                    [
                        factor_of(plan, true, stage, block_of(plan, dp_rank, pack))
                        / factor_of(plan, plan.speeds, stage, block_of(plan, dp_rank, pack))
                        for stage in range(plan.layout.num_stages)
                    ]
                    for pack in listed
                ]
            ).reshape(len(listed), plan.layout.num_stages)
            for listed in (packs.forward, packs.backward)
        ]
        split = tasks.split
        if split is not None:
            split = replace(split, input_s=split.input_s * scale[1], weight_s=split.weight_s * scale[1])
        really = replace(
            tasks, forward_s=tasks.forward_s * scale[0], backward_s=tasks.backward_s * scale[1], split=split
        )
        ends.append(simulate(really, action_columns(schedule)).makespan_s)
    return max(ends)


def optimum_s(planner: StepPlanner, num_tokens: list[int], true: RankSpeeds) -> float:
    """No assignment of whole documents to replicas without a pipeline is faster: brute force over all, and of the packs
    themselves only the documents' own seconds are counted. O(dp^n)."""
    costs = SpeedCosts(planner.costs, true)
    dp = planner.layout.dp
    of_replica = np.stack([costs.of_replica(dp_rank).document_seconds(num_tokens) for dp_rank in range(dp)])
    homes = np.array(list(product(range(dp), repeat=len(num_tokens))))
    loads = np.stack([((homes == dp_rank) * of_replica[dp_rank]).sum(axis=1) for dp_rank in range(dp)])
    return float(loads.max(axis=0).min())
