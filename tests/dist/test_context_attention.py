"""Attention of packs that several ranks share equals attention of whole documents by autograd."""

import pytest
import torch

from context_cases import DIM, GROUPS, HEADS, PLAIN, AttentionCase, attend_shared_packs, document_tensors
from context_plans import RULES, context_plan, merged_plan
from evenload.stepplan.validate import validate_plan
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


def assert_equals_whole(pool, plans: list[StepPlan], *, case=PLAIN, backend="cpu_flash"):
    for plan in plans:
        validate_plan(plan)
    world = plans[0].layout.dp * plans[0].layout.cp
    encoded = [encode_plan(plan) for plan in plans]
    ranks = pool.run(world, attend_shared_packs, encoded, torch.float64, case, backend)
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


@pytest.mark.parametrize("cp", sweep([3, 4, 2], 2))
def test_random_row_sets_equal_whole_documents(gloo_pool, cp):
    """Every sharding rule, documents cut differently in both directions, lengths that 2·cp does not divide."""
    plans = [context_plan(100 * cp + i, cp=cp, rule=RULES[i % len(RULES)]) for i in sweep(range(12), 6)]
    assert any(d.num_tokens < cp for plan in plans for d in plan.documents)
    moved = assert_equals_whole(gloo_pool, plans)
    assert any(max(received) > 0 for received in moved)


@pytest.mark.parametrize("window", sweep([7, 1, 100], 1))
def test_sliding_windows(gloo_pool, window):
    plans = [context_plan(i, cp=3, rule=RULES[i % len(RULES)]) for i in sweep(range(10), 4)]
    assert_equals_whole(gloo_pool, plans, case=AttentionCase(window=window))


CASES = {
    "sinks": AttentionCase(has_sinks=True),
    "narrow values": AttentionCase(value_dim=5),
    "wide values": AttentionCase(value_dim=12, has_sinks=True),
    "soft cap": AttentionCase(soft_cap=0.8),
    "window and sinks": AttentionCase(window=5, has_sinks=True),
    "window and soft cap": AttentionCase(window=7, soft_cap=0.8),
    "chunks": AttentionCase(chunk=7),
    "chunks of one token": AttentionCase(chunk=1),
    "chunks and sinks and narrow values": AttentionCase(chunk=6, has_sinks=True, value_dim=5),
    "all but chunks": AttentionCase(window=6, soft_cap=0.8, has_sinks=True, value_dim=5),
}


@pytest.mark.parametrize("backend", ["cpu_flash", "reference"])
@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in CASES.items()])
def test_what_layers_ask_for_of_documents_that_are_cut_and_shared(gloo_pool, case, backend):
    plans = [context_plan(i, cp=2, rule=RULES[i % len(RULES)]) for i in sweep(range(12), 4)]
    moved = assert_equals_whole(gloo_pool, plans, case=case, backend=backend)
    assert any(max(received) > 0 for received in moved)


@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in CASES.items()])
def test_what_layers_ask_for_of_documents_that_are_cut(gloo_pool, case):
    assert_equals_whole(gloo_pool, [context_plan(i, cp=1, rule="per_sequence") for i in range(8)], case=case)


@pytest.mark.parametrize(("dp", "cp"), sweep([(4, 1), (2, 2), (2, 1)], 2))
def test_blocks_of_replicas_equal_whole_documents(gloo_pool, dp, cp):
    """DP-Merge: some documents on all replicas, some on blocks inside, some on one."""
    rules = ["per_document", "per_sequence", "owners", "dacp"]
    plans = [merged_plan(10 * dp + i, dp=dp, cp=cp, rule=rules[i % len(rules)]) for i in sweep(range(8), 4)]
    assert_equals_whole(gloo_pool, plans)


def test_bf16_error_is_at_most_twice_that_of_plain_bf16(gloo_pool):
    """Cuts, merges over ranks and sums over slices must not cost more precision than bf16 does anyway."""
    plan = context_plan(5, cp=4, rule="per_document", lengths={0: 301, 1: 64})
    ranks = gloo_pool.run(4, attend_shared_packs, [encode_plan(plan)], torch.bfloat16, PLAIN, "cpu_flash")
    for document in plan.documents:
        ours = merged([rank[0][0] for rank in ranks], document.doc_id)
        plain = whole_attention(document.num_tokens, document.doc_id, dtype=torch.bfloat16)
        given = whole_attention(document.num_tokens, document.doc_id)
        for name, exact in given.items():
            error, allowed = (ours[name].double() - exact).norm(), (plain[name].double() - exact).norm()
            assert error <= 2 * allowed, name
