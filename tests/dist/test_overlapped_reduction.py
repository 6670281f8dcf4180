"""Gradients summed beside packs: only what is complete, in one order, equal to the bit."""

import pytest

from evenload.types.plan import encode_plan
from matrix import Row
from matrix_plans import case_of, plan_of
from overlap_cases import run_told
from plan_building import random_plan
from reference_training import make_tokens
from sweeps import sweep

ROW = Row("slimpack", "dp2", "1", "off", "replay", "own", "qwen2, tied", "none", "none", "directed", "on")
ROWS = {
    "one stage": ROW,
    "shared documents": ROW._replace(dp_merge="on", sharding="per_document", exchange="all_gather"),
    "context ranks": ROW._replace(layout="cp2", sharding="per_sequence", exchange="all_gather"),
    "stages, tied ends": ROW._replace(layout="pp2 dp2"),
    "virtual stages": ROW._replace(layout="pp2 dp2", virtual="2"),
    "split backward": ROW._replace(layout="pp2 dp2", schedule="zb_h1", strategy="balanced"),
    "virtual stages, split backward": ROW._replace(layout="pp2 dp2", virtual="2", schedule="list_split"),
    "tensor ranks": ROW._replace(layout="dp2 tp2"),
}


@pytest.mark.parametrize("name", ROWS)
def test_what_is_summed_early_is_complete_and_equal_to_the_bit(gloo_pool, name):
    row = ROWS[name]
    plan, case = plan_of(row), case_of(row)
    ranks = gloo_pool.run(plan.layout.world_size, run_told, [encode_plan(plan)], case.batch(), case.kind, case.changes)
    for (told,) in ranks:
        assert told.changed == ()
        assert told.equal
        assert list(told.order) == sorted(told.order, reverse=True), "from the head to the embedding"
        assert set(told.order) <= set(told.units)
        assert told.early == len(told.order) > 0, "nothing waits for the end of the step"


@pytest.mark.parametrize(("pp", "dp", "count"), [(1, 3, 8), (2, 2, 8)])
def test_replicas_may_do_what_they_like(gloo_pool, pp, dp, count):
    """Any cuts and orders, replicas with many packs, few or none: sums meet, nothing waits for ever."""
    plans = [random_plan(7000 * pp + 100 * dp + i, num_layers=4, pp=pp, dp=dp) for i in sweep(range(count), count // 4)]
    for plan in plans:
        batch = make_tokens([document.num_tokens for document in plan.documents], 64, seed=1)
        batch = dict(zip((document.doc_id for document in plan.documents), batch.values(), strict=True))
        ranks = gloo_pool.run(pp * dp, run_told, [encode_plan(plan)], batch, "llama", {"num_hidden_layers": 4})
        orders = [ranks[rank][0].order for rank in range(pp * dp)]
        for (told,) in ranks:
            assert told.changed == ()
            assert told.equal
        assert all(len(set(orders[stage * dp : (stage + 1) * dp])) == 1 for stage in range(pp))
