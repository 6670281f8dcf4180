"""What `plan.feedback` says when the measured speed of ranks changes how coming steps are planned."""

import numpy as np

from evenload.plan.feedback.measured_factors import rank_work_s
from evenload.types.plan import StepPlan
from evenload.types.rank_speeds import RankSpeeds

_MOST_NAMED = 4
"""Ranks, and replicas, that a line names."""


def speed_line(plan: StepPlan, speeds: RankSpeeds, from_step: int) -> str:
    """One sentence: which ranks are slower or faster than the others, and what their replicas get for it.

    Args:
        plan: the step that showed it; says how much work every pipeline rank has.
        from_step: the first step planned with these speeds.
    """
    layout, group = plan.layout, plan.layout.cp * plan.layout.tp
    told = []
    for dp_rank, row in enumerate(speeds.slowness):
        for pp_rank, slowness in enumerate(row):
            if slowness != 1.0:
                first = layout.global_rank(pp_rank=pp_rank, dp_rank=dp_rank)
                ranks = f"rank {first}" if group == 1 else f"ranks {first} to {first + group - 1}"
                told.append(f"{speeds.factors(dp_rank)[pp_rank]:.2f} times on {ranks}")
    shown = _shortened(told)
    if len(told) < layout.dp * layout.pp:
        shown.append(f"{speeds.drift:.2f} times on {'the others' if told else 'all ranks'}")
    said = ", ".join(shown).replace(" times", " times their predicted seconds", 1)
    # A full pipeline runs at the pace of its busiest rank.
    work_s = rank_work_s(plan).sum(axis=0)
    busiest_s = (np.array([speeds.factors(dp_rank) for dp_rank in range(layout.dp)]) * work_s).max(axis=1)
    change = speeds.drift * work_s.max() / busiest_s - 1.0
    replicas = [
        f"replica {dp_rank} gets about {abs(one):.0%} {'less' if one < 0 else 'more'} work"
        for dp_rank, one in enumerate(change.tolist())
        if round(abs(one), 2)
    ]
    equal = "replicas get equal work" if layout.dp > 1 else "packs and their order follow"
    done = ", ".join(_shortened(replicas)) if replicas and layout.dp > 1 else equal
    return f"feedback: packs take {said}: {done} from step {from_step} on"


def _shortened(parts: list[str]) -> list[str]:
    more = [f"and {len(parts) - _MOST_NAMED} more"] if len(parts) > _MOST_NAMED else []
    return parts[:_MOST_NAMED] + more
