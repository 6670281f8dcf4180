"""Where the time of a planned step goes, as shares of all devices' time; they add up to 1.

`types.time_split` in fewer columns:

useful          the lower bound: linear layers, attention and head of real tokens, once, at full kernel speed
extra work      the rest of busy time: recomputing, copies to the host, tensor- and context-parallel transfers and
                waits, padding, tiles, prefix traffic, constants of packs and slices
fill and drain  pipeline ranks before their first and after their last pack
dependency      gaps between packs: a stage is late, because packs differ or the order makes it wait
hops            gaps in which only a transfer between stages is under way
replicas        faster replicas wait for the slowest
update          gradient reduction, optimizer, switch of layout
"""

from evenload.plan.planner import Proposal

PARTS = ("useful", "extra work", "fill and drain", "dependency", "hops", "replicas", "update")
_FIELDS = {
    "useful": ("useful_s",),
    "extra work": (
        *("kernels_s", "padding_s", "recompute_s", "offload_s"),
        *("tp_communication_s", "cp_communication_s", "cp_imbalance_s"),
    ),
    "fill and drain": ("warmup_s", "cooldown_s"),
    "dependency": ("imbalance_s", "dependency_s"),
    "hops": ("p2p_s",),
    "replicas": ("dp_imbalance_s",),
    "update": ("reduction_s", "optimizer_s", "switch_s"),
}


def time_shares(proposal: Proposal) -> dict[str, float]:
    """Shares of one step."""
    split, step_s = proposal.time_split(), proposal.plan.predicted.step_time_s
    shares = {part: sum(getattr(split, field) for field in fields) / step_s for part, fields in _FIELDS.items()}
    assert sum(len(fields) for fields in _FIELDS.values()) == len(split.__struct_fields__), "every cause has a part"
    assert abs(sum(shares.values()) - 1) < 1e-6, shares
    return shares
