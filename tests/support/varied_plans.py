"""Random plans with policies, split backwards and virtual stages, under every schedule; their expected memory."""

import dataclasses
import random

import msgspec
import numpy as np

from evenload.cost.memory import bytes_by_kind, peak_host_bytes
from evenload.schedule.packflow import packflow_list
from evenload.schedule.simulate import memory_ledger
from evenload.schedule.static_schedules import zero_bubble_h1
from evenload.stepplan.resimulation import replica_columns, tasks_of_columns
from evenload.stepplan.validate import validate_plan
from evenload.types.layout import ParallelLayout, even_layout
from evenload.types.model import ModelSpec
from evenload.types.pipeline import PipelineTasks, action_columns
from evenload.types.plan import PackTimes, Schedule, StepPlan, seal
from evenload.types.timeline import MEMORY_KINDS
from pipeline_cases import with_split
from plan_building import greedy_packs, pack_plan, running_need, step_plan, word_schedule

SCHEDULES = ("static", "list", "list_split", "zb_h1")
POLICY_SETS = {
    "replay": ("replay",),
    "recompute": ("recompute",),
    "offload": ("offload",),
    "kept": ("replay", "offload"),
    "mixed": ("replay", "recompute", "offload"),
}


def varied_plan(
    seed: int,
    *,
    num_layers: int,
    pp: int,
    dp: int = 1,
    virtual: int = 1,
    tp: int = 1,
    policies: str = "mixed",
    schedule: str = "list",
    whole: bool = False,
    max_tokens: int = 40,
    num_documents: int = 7,
    max_budget: int = 60,
) -> StepPlan:
    """Random documents, cuts (`whole`: none, and the same packs backward), seconds and policies; a legal schedule of
    the kind asked for; packs of at most `max_budget` tokens, but for larger slices."""
    rng, numbers = random.Random(seed), np.random.default_rng(seed)
    layout = even_layout(num_layers, dp=dp, pp=pp, tp=tp, virtual=virtual)
    lengths = {doc: rng.randint(1, max_tokens) for doc in range(rng.randint(1, num_documents))}
    owner = {doc: rng.randrange(dp) for doc in lengths}
    pack_plans, schedules, times = [], [], []
    for dp_rank in range(dp):
        mine = {doc: n for doc, n in lengths.items() if owner[doc] == dp_rank}
        cuts = [[] if whole else [rng.random() for _ in range(rng.randint(0, 4))] for _ in range(2)]
        budget = rng.randint(1, max_budget)
        budgets = budget, budget if whole else rng.randint(1, max_budget)
        given = zip(cuts, budgets, (False, True), strict=True)
        sides = [greedy_packs(mine, cut, most, last_first=last) for cut, most, last in given]
        packs = pack_plan(dp_rank, *sides)
        chosen = {doc: rng.choice(POLICY_SETS[policies]) for doc in mine}
        packs = msgspec.structs.replace(packs, policies={d: p for d, p in chosen.items() if p != "replay"})
        tasks = _random_tasks(packs, layout, numbers)
        pack_plans.append(packs)
        schedules.append(_schedule(packs, tasks, schedule, pp, rng))
        times.append(_times(tasks, is_split="I" in str(schedules[-1].grid())))
    plan = step_plan(layout, lengths, pack_plans, schedules)
    plan = seal(msgspec.structs.replace(plan, times=tuple(times)))
    validate_plan(plan)
    return plan


def _random_tasks(packs, layout, numbers: np.random.Generator) -> PipelineTasks:
    m_f, m_b, stages = len(packs.forward), len(packs.backward), layout.num_stages
    seconds = numbers.uniform(0.5, 2, (m_f, stages)), numbers.uniform(1, 4, (m_b, stages))
    p2p_s = numbers.uniform(0, 0.2, m_f), numbers.uniform(0, 0.2, m_b)
    return tasks_of_one_byte(layout, *seconds, *p2p_s, packs.forwards_needed())


def tasks_of_one_byte(
    layout: ParallelLayout, forward_s, backward_s, p2p_forward_s, p2p_backward_s, forwards_needed
) -> PipelineTasks:
    """Of some packs; a forward keeps one byte, so that a limit of bytes is one of packs."""
    tasks = PipelineTasks.without_bytes(
        forward_s=forward_s,
        backward_s=backward_s,
        p2p_forward_s=p2p_forward_s,
        p2p_backward_s=p2p_backward_s,
        forwards_needed=forwards_needed,
        stage_to_rank=layout.stage_to_rank,
    )
    held = dataclasses.replace(tasks.held, forward_kept_bytes=np.ones(forward_s.shape, np.int64))
    return with_split(dataclasses.replace(tasks, held=held))


def _schedule(packs, tasks: PipelineTasks, name: str, pp: int, rng: random.Random) -> Schedule:
    if name == "static":
        assert tasks.num_stages == pp, "the word runs one stage a rank"
        slack = sorted((rng.randint(0, 2 * pp) for _ in range(pp)), reverse=True)
        return word_schedule(packs, pp, running_need(packs), slack)
    if name == "zb_h1":
        return zero_bubble_h1(tasks).to_schedule()
    cap = np.full(tasks.num_ranks, rng.choice([2, 5, 2**40]), np.int64)
    lookahead = rng.choice([None, 0, 3])
    return packflow_list(
        tasks, cap_bytes=cap, alternate=rng.random() < 0.5, lookahead=lookahead, split=name == "list_split"
    ).to_schedule()


def _times(tasks: PipelineTasks, *, is_split: bool) -> PackTimes:
    def rows(column: np.ndarray) -> tuple[tuple[float, ...], ...]:
        return tuple(map(tuple, column.tolist()))

    assert tasks.split is not None
    return PackTimes(
        forward_s=rows(tasks.forward_s),
        backward_s=rows(tasks.backward_s),
        p2p_forward_s=tuple(tasks.p2p_forward_s.tolist()),
        p2p_backward_s=tuple(tasks.p2p_backward_s.tolist()),
        input_s=rows(tasks.split.input_s) if is_split else (),
        weight_s=rows(tasks.split.weight_s) if is_split else (),
    )


def predicted_kind_bytes(plan: StepPlan, model: ModelSpec, dp_rank: int) -> list[dict[str, dict[str, list[int]]]]:
    """Per pipeline rank, kind by kind, what it holds while its actions run and after them: "running" and "after"."""
    columns = replica_columns(plan, dp_rank)
    tasks = tasks_of_columns(plan, dp_rank, model, columns)
    kinds = bytes_by_kind(model, plan.layout, tasks, columns)
    actions = action_columns(plan.schedules[dp_rank])
    ledger = memory_ledger(kinds, actions)
    result, row = [], 0
    for count in np.diff(actions.rank_offset).tolist():
        samples = ledger[row : row + 1 + 2 * count]
        row += len(samples)
        result.append(
            {
                name: {"running": samples[1::2, at].tolist(), "after": samples[2::2, at].tolist()}
                for at, name in enumerate(MEMORY_KINDS)
            }
        )
    return result


def predicted_host_bytes(plan: StepPlan, model: ModelSpec, dp_rank: int) -> list[int]:
    """Per pipeline rank the most that it has offloaded at once."""
    packs, actions = replica_columns(plan, dp_rank), action_columns(plan.schedules[dp_rank])
    return peak_host_bytes(model, plan.layout, packs, actions).tolist()
