"""Layers that carry a state, in documents that several ranks share: they train as plain transformers does, and whatever
could go wrong with the states that travel shows."""

import math

import pytest
import torch

from context_plans import RULES, context_plan, merged_plan, with_context
from dist_equality import assert_plans_equal_plain
from evenload.stepplan.cp_rows import replica_rows
from evenload.stepplan.validate import validate_plan
from evenload.types.plan import StepPlan, encode_plan
from reference_training import (
    make_tokens,
    plain_document_losses,
    plain_loss_and_gradients,
    relative_error,
    structure,
    tiny_config,
)
from state_cases import MISTAKES, losses_of_forwards, mistaken_gradients
from sweeps import spread, sweep
from varied_plans import varied_plan

FEW = ("qwen3_next", "kimi_linear", "bamba", "jamba", "lfm2")
"""One of every function. Their second layer attends."""
SMALL = {"num_hidden_layers": 2}


def plans_of(cp: int, first_seed: int, **options) -> list[StepPlan]:
    """One of every sharding rule, with cuts that differ between the directions, and documents shorter than ranks."""
    given = {"num_layers": 2, **options}
    return [context_plan(first_seed + at, cp=cp, rule=rule, **given) for at, rule in enumerate(RULES)]


def absent_ranks(plan: StepPlan) -> int:
    """How often a rank has no rows of a pack that others share."""
    rows = replica_rows(plan, 0)
    packs = [pack for pack in (*rows.forward, *rows.backward) if pack is not None and pack.shared]
    size = plan.layout.cp * plan.layout.dp
    return sum(not pack.ranges(rank) for pack in packs for rank in range(pack.block.size * size // plan.layout.dp))


def cut_ranges(plan: StepPlan) -> int:
    """How many shared slices continue their documents, in which ranks have more than one range."""
    rows = replica_rows(plan, 0)
    packs = [pack for pack in (*rows.forward, *rows.backward) if pack is not None]
    return sum(piece.start > 0 and sum(map(len, piece.ranges)) > 1 for pack in packs for piece in pack.shared)


@pytest.mark.parametrize("kind", FEW)
@pytest.mark.parametrize(("cp", "exchange"), [(2, "all_gather"), (3, "ring")])
def test_shared_documents_equal_plain_training(gloo_pool, kind, cp, exchange):
    plans = plans_of(cp, 40 * cp)
    for plan in plans:
        validate_plan(plan)
    assert sum(map(absent_ranks, plans)) > 0
    assert sum(map(cut_ranges, plans)) > 3
    assert_plans_equal_plain(gloo_pool, plans, kind=kind, changes=SMALL, exchange=exchange)


@pytest.mark.parametrize("kind", ["falcon_h1", "granitemoehybrid", "olmo_hybrid"])
def test_layers_that_attend_and_carry_and_pipelines(gloo_pool, kind):
    """A layer of the first runs attention beside its scan, so that transfers of both alternate."""
    plans = plans_of(2, 7, pp=2)[:3]
    assert sum(map(absent_ranks, plans)) > 0
    assert_plans_equal_plain(gloo_pool, plans, kind=kind, changes=SMALL)


def test_weight_gradients_may_wait(gloo_pool):
    """Transfers are in the I of a backward that is divided into I and W; documents are recomputed and offloaded."""
    plan = varied_plan(5, num_layers=2, pp=2, schedule="zb_h1")
    plans = [with_context(plan, cp=2, rule=rule) for rule in ("per_document", "owners")]
    assert all("I" in plan.schedules[0].grid() for plan in plans)
    assert_plans_equal_plain(gloo_pool, plans, kind="qwen3_next", changes=SMALL)


@pytest.mark.parametrize("kind", FEW)
def test_bf16_is_as_good_as_plain_bf16(gloo_pool, kind):
    """Convolutions have states of bf16, which travel as fp32."""
    plans = [context_plan(6, cp=2, rule="per_document", lengths={0: 40, 1: 26}, num_layers=2)]
    assert_plans_equal_plain(gloo_pool, plans, kind=kind, changes=SMALL, dtype=torch.bfloat16)


@pytest.mark.parametrize("kind", ["qwen3_next", "lfm2"])
def test_losses_of_forwards_alone(gloo_pool, kind):
    plans = plans_of(2, 80)
    config = tiny_config(kind, **SMALL)
    for plan in plans:
        lengths = [document.num_tokens for document in plan.documents]
        tokens = make_tokens(lengths, config.vocab_size)
        ranks = gloo_pool.run(2, losses_of_forwards, kind, SMALL, encode_plan(plan), tokens)
        expected = plain_document_losses(config, ranks[0][1], tokens, torch.float64)
        found = sum(losses for losses, _ in ranks)
        assert found == pytest.approx(list(expected.values()), rel=1e-10, abs=1e-12)


@pytest.mark.parametrize("kind", sweep(FEW, 3))
def test_blocks_of_replicas_equal_plain_training(gloo_pool, kind):
    """DP-Merge, some documents recomputed or offloaded."""
    rules = ["per_document", "per_sequence", "owners"]
    plans = [merged_plan(30 + at, dp=2, rule=rule, num_layers=2) for at, rule in enumerate(rules)]
    assert_plans_equal_plain(gloo_pool, plans, kind=kind, changes=SMALL)


def test_blocks_of_replicas_that_are_groups_already(gloo_pool):
    plans = [merged_plan(90 + at, dp=2, cp=2, rule=rule, num_layers=2) for at, rule in enumerate(RULES[1:])]
    assert_plans_equal_plain(gloo_pool, plans, kind="qwen3_next", changes=SMALL)


# What is sent


def test_as_much_travels_whatever_the_tokens(gloo_pool):
    """M and a state a range, in both directions: all of a model without attention, counted by hand."""
    config = tiny_config("mamba2", num_hidden_layers=2)
    scan = config.num_heads * (1 + config.head_dim * config.state_size)
    convolution = (config.num_heads * config.head_dim + 2 * config.n_groups * config.state_size) * (
        config.conv_kernel - 1
    )
    plans = [context_plan(3, cp=2, rule="per_document", lengths={0: n}, whole=True, num_layers=2) for n in (40, 400)]
    measured = assert_plans_equal_plain(gloo_pool, plans, kind="mamba2", changes=SMALL)
    # Two ranges of one other rank, two layers, two directions, float64.
    assert [[rank.context for rank in ranks] for ranks in measured] == [[(scan + convolution) * 2 * 2 * 2 * 8] * 2] * 2


def test_the_survey_knows_what_a_rank_without_rows_must_send():
    for kind, sizes in {"qwen3_next": [(64 * 4, 48 * 4)], "bamba": [(8, 768)], "jamba": [(768, 768)]}.items():
        first = structure(tiny_config(kind)).sites[0].calls
        assert [call.sizes for call in first[1:]] == sizes
        assert first[0].sizes == (0, math.prod(first[0].state))


# What could go wrong, each as a mutant of all ranks


@pytest.mark.parametrize(
    ("kind", "mistake"), [(kind, name) for kind in spread(("qwen3_next", "bamba", "lfm2"), 3) for name in MISTAKES]
)
def test_a_mistake_shows(gloo_pool, kind, mistake):
    plan = context_plan(6, cp=2, rule="per_document", lengths={0: 40, 1: 26}, num_layers=2)
    of_replica = plan.pack_plans[0]
    assert all(any(p.slices[0].start for p in packs) for packs in (of_replica.forward, of_replica.backward))
    config = tiny_config(kind, **SMALL)
    tokens = make_tokens([40, 26], config.vocab_size)
    case = kind, SMALL, [encode_plan(plan)], [tokens], torch.float64, "all_gather"
    ranks = gloo_pool.run(2, mistaken_gradients, mistake, *case)
    weights = {name: torch.from_numpy(one) for one in ranks for name, one in one[0][3].items()}
    _, plain = plain_loss_and_gradients(config, weights, tokens, torch.float64)
    wrong = max(
        relative_error(torch.from_numpy(one), plain[name]) for rank in ranks for name, one in rank[0][1].items()
    )
    assert wrong >= 1e-2
