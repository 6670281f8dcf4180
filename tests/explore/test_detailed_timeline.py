import numpy as np
import pytest

from cost_samples import sample_coefficients, sample_model
from evenload.config.keys import plan_options
from evenload.explore.timelines import detailed_timeline, split_proposal
from evenload.plan.planner import Proposal, StepPlanner
from evenload.plan.strategies.registry import STRATEGIES
from evenload.types.cluster import LinkSpec
from evenload.types.document import Document
from evenload.types.layout import ParallelLayout, even_layout
from evenload.types.timeline import KINDS, SIDE_KINDS, Timeline
from predicted_timeline import predicted_timeline

LINK = LinkSpec(bandwidth_bytes_per_s=200.0, latency_s=0.1)
SLOW = LinkSpec(bandwidth_bytes_per_s=10.0, latency_s=0.1)
LENGTHS = [150, 90, 60, 30, 20, *([3] * 12)]
LAYOUTS = [
    even_layout(3, dp=2, pp=3),
    even_layout(4, dp=2, pp=2, virtual=2),
    even_layout(3, dp=2, cp=2, tp=2),
    even_layout(3, dp=4),
    even_layout(3, dp=9, pp=3),
]


def propose(layout: ParallelLayout, strategy: str, *, host=LINK, lengths=LENGTHS, **options) -> Proposal:
    coefficients = sample_coefficients(intra_node=LINK, inter_node=LINK, host_link=host, devices_per_node=64)
    settings = {"max_pack_tokens": 400, "dp_merge": True, "fixed_exact": {"solver_time_limit_s": 1.0}} | options
    planner = StepPlanner(
        sample_model(num_layers=layout.num_layers), coefficients, layout, None, plan_options(settings), host="unlimited"
    )
    documents = tuple(Document(doc_id=i, num_tokens=n, num_label_tokens=n) for i, n in enumerate(lengths))
    return planner.propose(0, documents, strategy)


def side_of(timeline: Timeline, kind: str) -> np.ndarray:
    assert timeline.side is not None
    return np.flatnonzero(timeline.side.kind == SIDE_KINDS.index(kind))


@pytest.mark.parametrize(
    ("layout", "strategy"),
    [(one, name) for one in LAYOUTS for name in STRATEGIES if one.pp == 1 or not STRATEGIES[name].needs_one_stage],
    ids=lambda value: value if isinstance(value, str) else value.describe(),
)
@pytest.mark.parametrize("policy", ["replay", "recompute", "offload"])
def test_details_agree_with_what_the_planner_simulated(layout, strategy, policy) -> None:
    """Times, bytes and peak of every strategy, layout and policy are the planner's to the bit; kinds add up."""
    proposal = propose(layout, strategy, policy=policy)
    plan = proposal.plan
    detailed, plain = detailed_timeline(plan, proposal.costs), predicted_timeline(plan, proposal.costs.model)
    for name in ("dp_rank", "rank", "stage", "kind", "pack", "start_s", "end_s", "memory_time_s", "memory_bytes"):
        assert np.array_equal(getattr(detailed, name), getattr(plain, name)), name
    assert detailed.step_time_s == plan.predicted.step_time_s
    assert detailed.peak_bytes() == plan.predicted.peak_memory_bytes
    kinds = detailed.memory_kind_bytes
    assert kinds is not None
    assert np.array_equal(kinds.sum(axis=1), detailed.memory_bytes)
    assert kinds.min() >= 0
    for dp_rank, choice in enumerate(proposal.choices):
        for rank, peak in enumerate(choice.candidate.simulation.peak_bytes.tolist()):
            own = (detailed.memory_dp_rank == dp_rank) & (detailed.memory_rank == rank)
            assert kinds[own].sum(axis=1).max() == peak
            assert np.array_equal(kinds[own][0], kinds[own][-1]), "everything is given back"


def _with_costs(proposal: Proposal):
    return proposal.plan, proposal.costs


def test_copies_fit_into_their_actions_and_stick_out_by_what_the_plan_charges() -> None:
    """Slow host link: forward and backward last as long as their copies; a fast one costs nothing."""
    layout = even_layout(3, dp=2, pp=3)
    slow = propose(layout, "balanced", host=SLOW, policy="offload")
    timeline = detailed_timeline(*_with_costs(slow))
    side = timeline.side
    assert side is not None
    for name, kind in (("offload", "F"), ("reload", "B")):
        rows = side_of(timeline, name)
        assert len(rows) == (timeline.kind == KINDS.index(kind)).sum(), "every pack is copied on every stage"
        for row in rows.tolist():
            at = task_of(timeline, row, kind)
            assert timeline.start_s[at] <= side.start_s[row] + 1e-9
            assert side.end_s[row] <= timeline.end_s[at] + 1e-9
    copied_s = sum(float((side.end_s - side.start_s)[side_of(timeline, name)].sum()) for name in ("offload", "reload"))
    hidden_s = copied_s - split_proposal(slow).offload_s * 6  # six pipeline ranks in all
    busy_s = float((timeline.end_s - timeline.start_s).sum())
    compute_s = busy_s - split_proposal(slow).offload_s * 6
    assert 0 < hidden_s <= compute_s + 1e-6
    assert copied_s > compute_s
    fast = propose(layout, "balanced", host=LinkSpec(bandwidth_bytes_per_s=1e9, latency_s=0.0), policy="offload")
    assert split_proposal(fast).offload_s == 0


def task_of(timeline: Timeline, row: int, *kinds: str) -> int:
    side = timeline.side
    assert side is not None
    found = (timeline.dp_rank == side.dp_rank[row]) & (timeline.pack == side.pack[row])
    found &= (timeline.stage == side.stage[row]) & np.isin(timeline.kind, [KINDS.index(kind) for kind in kinds])
    (at,) = np.flatnonzero(found)
    return int(at)


def test_every_replica_reduces_together_and_updates_after_the_slowest() -> None:
    proposal = propose(even_layout(3, dp=9, pp=3), "best_fit")
    timeline = detailed_timeline(*_with_costs(proposal))
    side = timeline.side
    assert side is not None
    slowest_s = max(proposal.plan.predicted.per_replica_s)
    reduction, optimizer, gather = (side_of(timeline, name) for name in ("reduction", "optimizer", "gather"))
    lanes = {(dp_rank, rank) for dp_rank in range(9) for rank in range(3)}
    for rows in (reduction, optimizer, gather):
        assert set(zip(side.dp_rank[rows].tolist(), side.rank[rows].tolist(), strict=True)) == lanes
        assert (side.pack[rows] == -1).all()
    for rank in range(3):
        own = reduction[side.rank[reduction] == rank]
        packs_end_s = timeline.end_s[timeline.rank == rank].max()
        assert side.start_s[own].min() == packs_end_s
        assert len(set(zip(side.start_s[own].tolist(), side.end_s[own].tolist(), strict=True))) == len(own) / 9
    assert (side.start_s[optimizer] == max(slowest_s, side.end_s[reduction].max())).all()
    assert (side.start_s[gather] == side.end_s[optimizer][0]).all()
    assert side.end_s[gather].tolist() == pytest.approx([proposal.plan.predicted.step_time_s] * 27)
