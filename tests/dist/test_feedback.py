"""Plans that follow the speed of ranks, in real processes: work moves, gradients and losses stay plain training's."""

from pathlib import Path

import pytest

from dist_equality import assert_plans_equal_plain
from dist_training import throttled_steps
from evenload.plan.planner import StepPlanner
from evenload.plan.problem.options import PlanOptions
from evenload.runtime.config.train_config import load_train_config
from evenload.types.document import Document
from evenload.types.hf_config import model_from_hf_config
from evenload.types.layout import even_layout
from evenload.types.rank_speeds import RankSpeeds
from reference_training import tiny_config
from steep_costs import STEEP_COSTS
from sweeps import sweep
from training_cases import plain_losses, write_training_config

STEPS = 6
LENGTHS = [64, 1, 9, 30, 1, 17, 5, 2, 41, 12, 1, 25]
LAYOUTS = {
    "pp2 dp2": {"pp": 2, "dp": 2},
    "dp2 cp2": {"dp": 2, "cp": 2},
    "dp2": {"dp": 2},
    "dp2 tp2": {"dp": 2, "tp": 2},
}


@pytest.mark.parametrize("name", sweep(list(LAYOUTS), 2))
def test_gradients_of_plans_for_different_speeds_equal_plain_training(gloo_pool, name):
    """Every strategy that follows speeds, with documents shared by replicas where they may be; float64, to 1e-10."""
    model = model_from_hf_config(tiny_config("llama").to_dict(), "llama", 8)
    layout = even_layout(model.num_layers, **LAYOUTS[name])
    documents = tuple(Document(doc_id=i, num_tokens=n, num_label_tokens=n - 1) for i, n in enumerate(LENGTHS))
    plans = []
    for slow in (1.3, 4.0):
        true = RankSpeeds(slowness=((1.0,) * layout.pp, (1.0,) * (layout.pp - 1) + (slow,)))
        for strategy, merge in (("balanced", None), ("slimpack", False), ("slimpack", True), ("auto", True)):
            options = PlanOptions(max_pack_tokens=64, dp_merge=merge)
            planner = StepPlanner(model, STEEP_COSTS, layout, None, options, host="unlimited")
            plans.append(planner.propose(0, documents, strategy, speeds=true).require_feasible())
    tokens = [
        sum(piece.num_tokens for pack in plans[4].pack_plans[replica].forward for piece in pack.slices)
        for replica in (0, 1)
    ]
    assert tokens[1] < tokens[0]
    assert_plans_equal_plain(gloo_pool, plans)


@pytest.mark.long
@pytest.mark.parametrize(
    ("strategy", "sizes", "true"),
    sweep(
        [
            ("slimpack", {"dp": 2, "pp": 2}, RankSpeeds(slowness=((1.0, 1.0), (1.0, 1.4)))),
            ("balanced", {"dp": 2}, RankSpeeds(slowness=((1.0,), (1.4,)))),
        ],
        1,
    ),
)
def test_a_run_with_a_slow_rank_gives_it_less_work_and_trains_the_same(
    gloo_pool, tmp_path: Path, strategy, sizes, true
):
    """Read ahead by one step: what step 1 and 2 show decides from step 3 or 4 on, at the same losses as plain AdamW."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for i in range(90):
        (corpus / f"{i}.txt").write_text(f"document {i} " * (1 + (i * 7) % 13))
    file = str(write_training_config(tmp_path, corpus, data="prefetch_steps = 1", num_layers=4))
    overrides = [
        f"plan.strategy={strategy}",
        "plan.options.dp_merge=false" if strategy == "slimpack" else "plan.options.candidates=6",
        "data.batch_documents=14",
        f"train.steps={STEPS}",
        *(f"parallel.{key}={value}" for key, value in sizes.items()),
    ]
    world = sizes["dp"] * sizes.get("pp", 1)
    plain = plain_losses(load_train_config(Path(file), overrides))
    followed = gloo_pool.run(world, throttled_steps, file, [*overrides, "plan.feedback=true"], STEPS, true)[0]
    left = [*overrides, f"train.output_dir={tmp_path}/left"]
    ignored = gloo_pool.run(world, throttled_steps, file, left, STEPS, true)[0]

    assert [step.loss for step in followed] == pytest.approx(plain, rel=1e-9)
    assert [step.loss for step in ignored] == pytest.approx(plain, rel=1e-9)
    assert all(step.speeds is None and step.new_speeds is None for step in ignored)
    # Step 0 warms up; step 1 shows the slow rank; read ahead by one, step 3 is the first planned with it.
    told = [index for index, step in enumerate(followed) if step.new_speeds is not None]
    assert told == [1]
    assert followed[1].new_speeds == followed[3].speeds
    assert followed[1].speeds_from_step == 3
    assert [step.speeds for step in followed[:3]] == [None] * 3
    for step, other in zip(followed[3:], ignored[3:], strict=True):
        assert step.speeds.factors(1)[-1] == pytest.approx(1.4, rel=1e-6)
        assert step.shares[1] < other.shares[1] - 0.03
