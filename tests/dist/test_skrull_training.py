"""`skrull` trains like plain training, with context ranks and without, and where memory makes it roll back."""

import msgspec
import numpy as np
import pytest

from cost_samples import documents
from dist_equality import assert_plans_equal_plain
from evenload.cost.coefficients import CostCoefficients, PassCoefficients
from evenload.cost.pack_cost import PackCosts
from evenload.data.hub import model_from_config
from evenload.planning.planner import StepPlanner
from evenload.planning.problem import PlanOptions, StepProblem
from evenload.planning.strategies.skrull import SHARED, bucket_tokens, step_documents
from evenload.stepplan.validate import validate_plan
from evenload.types.cluster import LinkSpec
from evenload.types.layout import even_layout
from reference.dacp import algorithm_1, chosen
from reference_training import tiny_config

COSTS = CostCoefficients(
    source="analytic",
    device="test",
    peak_flops_per_s=1e9,
    forward=PassCoefficients(linear_s_per_token=1e-3, attention_s_per_pair=1e-4, pack_s=1e-4),
    backward=PassCoefficients(linear_s_per_token=2e-3, attention_s_per_pair=2.5e-4, pack_s=2e-4),
    p2p_bandwidth_bytes_per_s=1e9,
    p2p_latency_s=1e-5,
    reduce_bandwidth_bytes_per_s=1e9,
    reduce_latency_s=1e-5,
    intra_node=LinkSpec(bandwidth_bytes_per_s=1e9, latency_s=1e-3),
    devices_per_node=8,
)


# Constants of packs so dear that a replica's documents go into as few micro-batches as buckets allow.
FEW_PACKS = msgspec.structs.replace(
    COSTS,
    forward=msgspec.structs.replace(COSTS.forward, pack_s=0.5),
    backward=msgspec.structs.replace(COSTS.backward, pack_s=1.0),
)


TWO_REPLICAS = [33, 24, 18, 2, 7, 30, 18, 30, 40]


@pytest.mark.parametrize(
    ("dp", "cp", "lengths", "bucket"),
    [(1, 2, [12, 41, 40, 10, 5, 10, 5], 64), (1, 4, [3, 2, 6, 9, 37, 2], 18), (2, 2, TWO_REPLICAS, 50)],
)
def test_rolled_back_plans_equal_plain_training(gloo_pool, dp, cp, lengths, bucket):
    """A document fits nowhere, not even shared, until a rank gives up another one, which all share (Skrull §4.1)."""
    model = model_from_config(tiny_config("llama").to_dict(), "llama", 8)
    layout = even_layout(model.num_layers, dp=dp, cp=cp)
    step = documents(lengths)

    def problem_within(memory_bytes):
        ids, cap = np.arange(len(lengths)), np.full(1, memory_bytes)
        return StepProblem(ids, np.array(lengths), PackCosts(model, FEW_PACKS, layout), cap, PlanOptions())

    least, most = 0, 2**32  # bytes; the least with which a rank may hold a bucket
    while least < most:
        middle = (least + most) // 2
        least, most = (least, middle) if bucket_tokens(problem_within(middle)) >= bucket else (middle + 1, most)
    problem = problem_within(least)
    assert bucket_tokens(problem) == bucket
    plan = StepPlanner(model, FEW_PACKS, layout, least, host="unlimited").plan(0, step, "skrull")
    validate_plan(plan)
    assert any(is_rolled_back(problem, pack) for packs in plan.pack_plans for pack in packs.forward)
    assert_plans_equal_plain(gloo_pool, [plan])


def is_rolled_back(problem, pack):
    """Whether Algorithm 1 places some document only by giving up another, and the plan is what it found then."""
    columns = step_documents(problem, bucket_tokens(problem)).columns
    batch = chosen(columns, [piece.doc_id for piece in pack.slices])
    owner = list(pack.sharding)
    if owner != algorithm_1(batch).tolist() or set(owner) == {SHARED}:
        return False
    tokens, shares, ranks = batch.num_tokens.tolist(), batch.share_tokens().tolist(), range(batch.cp)
    room, load_s = [batch.bucket_tokens] * batch.cp, [0.0] * batch.cp
    for document in sorted(range(len(tokens)), key=tokens.__getitem__):
        rank = min(ranks, key=load_s.__getitem__)
        if room[rank] < tokens[document]:
            rank = max(ranks, key=room.__getitem__)
        if room[rank] >= tokens[document]:
            room[rank] -= tokens[document]
            load_s[rank] += batch.local_s[document]
        elif min(room) >= shares[document]:
            room = [free - shares[document] for free in room]
            load_s = [seconds + batch.shared_s[document] for seconds in load_s]
        else:
            return True
    return False
