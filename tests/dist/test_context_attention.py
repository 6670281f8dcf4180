"""Attention of packs that several ranks share equals attention of whole documents by autograd."""

import itertools

import pytest
import torch

from context_cases import DIM, GROUPS, HEADS, PLAIN, AttentionCase, attend_shared_packs, document_tensors
from context_plans import RULES, context_plan, merged_plan
from cost_samples import sample_coefficients
from evenload.cost.pack_cost import PackCosts
from evenload.stepplan.resimulation import replica_columns
from evenload.stepplan.validate import validate_plan
from evenload.types.cluster import LinkSpec
from evenload.types.layout import even_layout
from evenload.types.model import alike_model
from evenload.types.plan import StepPlan, encode_plan
from sweeps import sweep


def whole_attention(num_tokens, doc_id, case=PLAIN, dtype=torch.float64):
    """Output and gradients of one document by autograd: of the formula, in less than float64 of torch's own kernel."""
    given, sinks = document_tensors(num_tokens, doc_id, dtype, case), case.sinks(dtype)
    q, k, v = (given[name].clone().requires_grad_() for name in "qkv")
    row, column = torch.arange(num_tokens)[:, None], torch.arange(num_tokens)[None]
    visible = column <= row
    if case.window:
        visible &= column > row - case.window
    if case.chunk:
        visible &= column // case.chunk == row // case.chunk
    if dtype != torch.float64:
        out = torch.nn.functional.scaled_dot_product_attention(
            *(t.transpose(0, 1)[None] for t in (q, k, v)), attn_mask=visible, enable_gqa=True
        )[0].transpose(0, 1)
    else:
        keys, values = (t.repeat_interleave(HEADS // GROUPS, dim=1) for t in (k, v))
        scores = torch.einsum("thd,shd->hts", q, keys) * DIM**-0.5
        if case.soft_cap:
            scores = case.soft_cap * torch.tanh(scores / case.soft_cap)
        scores = scores.masked_fill(~visible, float("-inf"))
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None, None].expand(-1, num_tokens, 1)], dim=2)
        out = torch.einsum("hts,shd->thd", scores.softmax(-1)[..., :num_tokens], values)
    out.backward(given["grad"])
    found = {"out": out.detach(), "q": q.grad, "k": k.grad, "v": v.grad}
    return found if sinks is None else {**found, "sinks": sinks.grad}


def merged(per_rank, doc_id):
    """All ranks' rows together; every row from exactly one rank."""
    result = {}
    for name in ("out", "q", "k", "v"):
        parts = torch.stack([rank[doc_id][name] for rank in per_rank])
        assert ((~parts.isnan()).all(dim=(-1, -2)).sum(0) == 1).all()
        result[name] = parts.nan_to_num(0.0).sum(0)
    return result


def assert_equals_whole(pool, plans: list[StepPlan], exchange, *, case=PLAIN, backend="cpu_flash"):
    for plan in plans:
        validate_plan(plan)
    world = plans[0].layout.dp * plans[0].layout.cp
    encoded = [encode_plan(plan) for plan in plans]
    ranks = pool.run(world, attend_shared_packs, encoded, exchange, torch.float64, case, backend)
    for index, plan in enumerate(plans):
        sinks = []
        for document in plan.documents:
            ours = merged([rank[index][0] for rank in ranks], document.doc_id)
            whole = whole_attention(document.num_tokens, document.doc_id, case)
            sinks += [whole.pop("sinks")] if case.has_sinks else []
            for name, expected in whole.items():
                torch.testing.assert_close(ours[name], expected, rtol=1e-11, atol=1e-12)
        if case.has_sinks:
            parts = [part for rank in ranks if (part := rank[index][2]) is not None]
            torch.testing.assert_close(sum(parts), sum(sinks), rtol=1e-11, atol=1e-12)
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
    assert_equals_whole(gloo_pool, plans, "all_gather", case=AttentionCase(window=window))


EVERYWHERE = {
    "sinks": AttentionCase(has_sinks=True),
    "narrow values": AttentionCase(value_dim=5),
    "wide values": AttentionCase(value_dim=12, has_sinks=True),
    "soft cap": AttentionCase(soft_cap=0.8),
}
NOT_BY_RING = {
    "window and sinks": AttentionCase(window=5, has_sinks=True),
    "window and soft cap": AttentionCase(window=7, soft_cap=0.8),
    "chunks": AttentionCase(chunk=7),
    "chunks of one token": AttentionCase(chunk=1),
    "chunks and sinks and narrow values": AttentionCase(chunk=6, has_sinks=True, value_dim=5),
    "all but chunks": AttentionCase(window=6, soft_cap=0.8, has_sinks=True, value_dim=5),
}


@pytest.mark.parametrize("backend", ["cpu_flash", "reference"])
@pytest.mark.parametrize(
    ("exchange", "case"),
    [
        *(pytest.param("all_gather", case, id=name) for name, case in (EVERYWHERE | NOT_BY_RING).items()),
        *(pytest.param("ring", case, id=f"{name} by ring") for name, case in EVERYWHERE.items()),
    ],
)
def test_what_layers_ask_for_of_documents_that_are_cut_and_shared(gloo_pool, exchange, case, backend):
    plans = [context_plan(i, cp=2, rule=RULES[i % len(RULES)]) for i in sweep(range(12), 4)]
    moved = assert_equals_whole(gloo_pool, plans, exchange, case=case, backend=backend)
    assert any(max(received) > 0 for received in moved)


@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in (EVERYWHERE | NOT_BY_RING).items()])
def test_what_layers_ask_for_of_documents_that_are_cut(gloo_pool, case):
    assert_equals_whole(
        gloo_pool, [context_plan(i, cp=1, rule="per_sequence") for i in range(8)], "all_gather", case=case
    )


@pytest.mark.parametrize("exchange", ["all_gather", "ring"])
@pytest.mark.parametrize(("dp", "cp"), sweep([(4, 1), (2, 2), (2, 1)], 2))
def test_blocks_of_replicas_equal_whole_documents(gloo_pool, dp, cp, exchange):
    """DP-Merge: some documents on all replicas, some on blocks inside, some on one."""
    rules = ["per_document", "per_sequence", "owners", "dacp"]
    plans = [merged_plan(10 * dp + i, dp=dp, cp=cp, rule=rules[i % len(rules)]) for i in sweep(range(8), 4)]
    assert_equals_whole(gloo_pool, plans, exchange)


def test_a_ring_refuses_sliding_windows(gloo_pool):
    with pytest.raises(RuntimeError, match=r"parallel\.cp_exchange 'ring' and sliding windows"):
        assert_equals_whole(
            gloo_pool,
            [context_plan(1, cp=2, rule="per_document", lengths={0: 30})],
            "ring",
            case=AttentionCase(window=5),
        )


@pytest.mark.parametrize("exchange", ["all_gather", "ring"])
def test_bf16_error_is_at_most_twice_that_of_plain_bf16(gloo_pool, exchange):
    """Cuts, merges over ranks and sums over slices must not cost more precision than bf16 does anyway."""
    plan = context_plan(5, cp=4, rule="per_document", lengths={0: 301, 1: 64})
    ranks = gloo_pool.run(4, attend_shared_packs, [encode_plan(plan)], exchange, torch.bfloat16, PLAIN, "cpu_flash")
    for document in plan.documents:
        ours = merged([rank[0][0] for rank in ranks], document.doc_id)
        plain = whole_attention(document.num_tokens, document.doc_id, dtype=torch.bfloat16)
        given = whole_attention(document.num_tokens, document.doc_id)
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
    ranks = gloo_pool.run(cp, attend_shared_packs, [encode_plan(plan)], "ring", torch.float64, PLAIN, "cpu_flash")
    moved = max(received for ((_, received, _),) in ranks)
    model = alike_model(
        name="one layer", num_layers=1, hidden_size=HEADS * DIM, num_heads=HEADS, num_kv_heads=GROUPS, head_dim=DIM,
        ffn_hidden_size=8, vocab_size=8, bytes_per_element=8,
    )  # fmt: skip
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
