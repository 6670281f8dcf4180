"""Where the time of a planned step goes, as shares of all devices' time; they add up to 1.

useful          the lower bound: linear layers, attention and head of real tokens, once, at full kernel speed
extra work      the rest of busy time: recomputing, copies to the host, tensor- and context-parallel transfers,
                padding, tiles, prefix traffic, constants of packs and slices
fill and drain  pipeline ranks before their first and after their last pack
dependency      gaps between packs: the neighbour stage is late, because packs differ or memory makes it wait
hops            gaps in which only the transfer between stages is under way
replicas        faster replicas wait for the slowest
update          gradient reduction and optimizer
"""

import numpy as np

from evenload.plan.planner import Proposal
from evenload.simulate.bubble import split_bubble

PARTS = ("useful", "extra work", "fill and drain", "dependency", "hops", "replicas", "update")


def time_shares(proposal: Proposal, lower_bound_s: float) -> dict[str, float]:
    """Shares of one step.

    Args:
        lower_bound_s: of the documents that the plan trains.
    """
    found = [choice.candidate for choice in proposal.choices]
    step_s = proposal.plan.predicted.step_time_s
    ranks = found[0].tasks.num_ranks
    available_s = step_s * ranks * len(found)
    bubbles = [split_bubble(one.tasks, one.actions, one.simulation) for one in found]
    makespan_s = np.array([one.makespan_s for one in found])
    shares = {
        "useful": lower_bound_s / step_s,
        "extra work": sum(bubble.busy_s for bubble in bubbles) / available_s - lower_bound_s / step_s,
        "fill and drain": sum(bubble.warmup_s + bubble.cooldown_s for bubble in bubbles) / available_s,
        "dependency": sum(bubble.imbalance_s + bubble.dependency_s for bubble in bubbles) / available_s,
        "hops": sum(bubble.communication_s for bubble in bubbles) / available_s,
        "replicas": float((makespan_s.max() - makespan_s).sum()) * ranks / available_s,
        "update": (step_s - float(makespan_s.max())) / step_s,
    }
    assert abs(sum(shares.values()) - 1) < 1e-6, shares
    return shares
