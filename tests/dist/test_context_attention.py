"""Attention of packs that several ranks share equals attention of whole documents by autograd."""

import itertools

import pytest
import torch

from context_cases import DIM, GROUPS, HEADS, attend_shared_packs, document_tensors
from context_plans import RULES, context_plan, merged_plan
from cost_samples import sample_coefficients
from evenload.cost.pack_cost import PackCosts
from evenload.stepplan.resimulation import replica_columns
from evenload.stepplan.validate import validate_plan
from evenload.types.cluster import LinkSpec
from evenload.types.layout import even_layout
from evenload.types.model import AlikeLayers
from evenload.types.plan import StepPlan, encode_plan
from sweeps import sweep


def whole_attention(num_tokens, doc_id, window, dtype=torch.float64):
    """Output and gradients of one document by torch's own attention."""
    given = document_tensors(num_tokens, doc_id, dtype)
    q, k, v = (given[name].clone().requires_grad_() for name in "qkv")
    row, column = torch.arange(num_tokens)[:, None], torch.arange(num_tokens)[None]
    visible = (column <= row) & (column > row - window if window else column <= row)
    out = torch.nn.functional.scaled_dot_product_attention(
        *(t.transpose(0, 1)[None] for t in (q, k, v)), attn_mask=visible, enable_gqa=True
    )[0].transpose(0, 1)
    out.backward(given["grad"])
    return {"out": out.detach(), "q": q.grad, "k": k.grad, "v": v.grad}


def merged(per_rank, doc_id):
    """All ranks' rows together; every row from exactly one rank."""
    result = {}
    for name in ("out", "q", "k", "v"):
        parts = torch.stack([rank[doc_id][name] for rank in per_rank])
        assert ((~parts.isnan()).all(dim=(-1, -2)).sum(0) == 1).all()
        result[name] = parts.nan_to_num(0.0).sum(0)
    return result


def assert_equals_whole(pool, plans: list[StepPlan], exchange, *, window=0, backend="cpu_flash"):
    for plan in plans:
        validate_plan(plan)
    world = plans[0].layout.dp * plans[0].layout.cp
    encoded = [encode_plan(plan) for plan in plans]
    ranks = pool.run(world, attend_shared_packs, encoded, exchange, torch.float64, window, backend)
    for index, plan in enumerate(plans):
        for document in plan.documents:
            ours = merged([rank[index][0] for rank in ranks], document.doc_id)
            for name, expected in whole_attention(document.num_tokens, document.doc_id, window).items():
                torch.testing.assert_close(ours[name], expected, rtol=1e-11, atol=1e-12)
    return [[rank[index][1] for rank in ranks] for index in range(len(plans))]


@pytest.mark.parametrize("exchange", ["all_gather", "ring"])
@pytest.mark.parametrize("cp", sweep([3, 4, 2], 2))
def test_random_row_sets_equal_whole_documents(gloo_pool, cp, exchange):
    """Every sharding rule, documents cut differently in both directions, lengths that 2·cp does not divide."""
    plans = [context_plan(100 * cp + i, cp=cp, rule=RULES[i % len(RULES)]) for i in sweep(range(12), 6)]
    assert any(d.num_tokens < cp for plan in plans for d in plan.documents)
    moved = assert_equals_whole(gloo_pool, plans, exchange)
    assert any(max(received) > 0 for received in moved)


@pytest.mark.parametrize("window", sweep([7, 1, 100], 1))
def test_sliding_windows_by_all_gather(gloo_pool, window):
    plans = [context_plan(i, cp=3, rule=RULES[i % len(RULES)]) for i in sweep(range(10), 4)]
    assert_equals_whole(gloo_pool, plans, "all_gather", window=window)


@pytest.mark.parametrize("exchange", ["all_gather", "ring"])
@pytest.mark.parametrize(("dp", "cp"), sweep([(4, 1), (2, 2), (2, 1)], 2))
def test_blocks_of_replicas_equal_whole_documents(gloo_pool, dp, cp, exchange):
    """DP-Merge: some documents on all replicas, some on blocks inside, some on one."""
    rules = ["per_document", "per_sequence", "owners", "dacp"]
    plans = [merged_plan(10 * dp + i, dp=dp, cp=cp, rule=rules[i % len(rules)]) for i in sweep(range(8), 4)]
    assert_equals_whole(gloo_pool, plans, exchange)


def test_a_ring_refuses_sliding_windows(gloo_pool):
    with pytest.raises(RuntimeError, match=r"parallel\.cp_exchange 'ring' and sliding windows"):
        assert_equals_whole(gloo_pool, [context_plan(1, cp=2, rule="per_document", lengths={0: 30})], "ring", window=5)


@pytest.mark.parametrize("exchange", ["all_gather", "ring"])
def test_bf16_error_is_at_most_twice_that_of_plain_bf16(gloo_pool, exchange):
    """Cuts, merges over ranks and sums over slices must not cost more precision than bf16 does anyway."""
    plan = context_plan(5, cp=4, rule="per_document", lengths={0: 301, 1: 64})
    ranks = gloo_pool.run(4, attend_shared_packs, [encode_plan(plan)], exchange, torch.bfloat16, 0, "cpu_flash")
    for document in plan.documents:
        ours = merged([rank[0][0] for rank in ranks], document.doc_id)
        plain = whole_attention(document.num_tokens, document.doc_id, 0, torch.bfloat16)
        given = whole_attention(document.num_tokens, document.doc_id, 0)
        for name, exact in given.items():
            error, allowed = (ours[name].double() - exact).norm(), (plain[name].double() - exact).norm()
            assert error <= 2 * allowed, name


def slice_tokens(plan: StepPlan) -> list[int]:
    packs = plan.pack_plans[0]
    return [piece.stop - piece.start for pack in (*packs.forward, *packs.backward) for piece in pack.slices]


@pytest.mark.parametrize("cp", [2, 3])
def test_a_ring_moves_the_bytes_it_is_charged(gloo_pool, cp):
    """Prefixes travel with every slice of a cut document; the all-gather would be charged a fraction of that."""
    plans = (context_plan(seed, cp=cp, rule="per_document", lengths={0: 600, 1: 90}) for seed in itertools.count())
    # Slices too short to share would be charged as whole on one rank, which this rule does not do.
    plan = next(plan for plan in plans if all(n > 8 * cp for n in slice_tokens(plan)) and len(slice_tokens(plan)) > 6)
    ranks = gloo_pool.run(cp, attend_shared_packs, [encode_plan(plan)], "ring", torch.float64, 0, "cpu_flash")
    moved = max(received for ((_, received),) in ranks)
    model = AlikeLayers(
        name="one layer", num_layers=1, hidden_size=HEADS * DIM, num_heads=HEADS, num_kv_heads=GROUPS, head_dim=DIM,
        ffn_hidden_size=8, vocab_size=8, bytes_per_element=8,
    ).spec()  # fmt: skip
    link = LinkSpec(bandwidth_bytes_per_s=1.0, latency_s=0.0)
    columns, charged = replica_columns(plan, 0), {}
    for exchange in ("ring", "all_gather"):
        coefficients = sample_coefficients(intra_node=link, devices_per_node=8, context_exchange=exchange)
        costs = PackCosts(model, coefficients, even_layout(1, cp=cp))
        parts = costs.context_seconds(columns.forward, "forward") + costs.context_seconds(columns.backward, "backward")
        charged[exchange] = sum(float(seconds_a_byte.sum()) for seconds_a_byte in parts)
    # Ranks' rows of a slice differ by a token, and the fullest rank's count for all.
    assert charged["ring"] == pytest.approx(moved, rel=0.05)
    assert charged["ring"] > 1.5 * charged["all_gather"]
