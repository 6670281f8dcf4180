"""What a step needs is worked out before it: running a prepared one asks no planner and no simulator."""

import pytest

from dist_cases import run_prepared_without_simulator
from evenload.types.plan import encode_plan
from reference_training import make_tokens, tiny_config
from varied_plans import varied_plan


@pytest.mark.parametrize("channels", ["directed", "fifo"])
def test_a_prepared_step_runs_without_a_simulator(gloo_pool, channels):
    """Preparing needs it, so the ban would be seen."""
    plan = varied_plan(7, num_layers=4, pp=2, schedule="list_split", num_documents=8)
    batch = make_tokens([d.num_tokens for d in plan.documents], tiny_config("llama").vocab_size, seed=1)
    ranks = gloo_pool.run(2, run_prepared_without_simulator, encode_plan(plan), batch, channels)
    assert [refused for refused, _, _ in ranks] == ["the simulator was asked"] * 2
    for _, banned, free in ranks:
        assert banned == free
    assert ranks[1][1] > 0.0
