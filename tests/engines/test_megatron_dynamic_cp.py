import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamic_scheduler import (
    FailingScheduler,
    MegatronScheduler,
    data_schedule_module,
    require_valid,
    run_on_ranks,
)
from evenload.cost.analytic import analytic_coefficients
from evenload.cost.pack_cost import PackCosts
from evenload.data.hub import model_from
from evenload.engines.context_groups import GroupPrices, group_prices, group_sizes, plan_context_groups, step_seconds
from evenload.errors import ConfigError, InfeasiblePlanError
from evenload.integrations.engines.megatron_dynamic_cp import register_scheduler, scheduler_class
from evenload.types.cluster_catalog import cluster_from
from evenload.types.layout import even_layout


def costs_of(num_ranks, pp=1):
    model = model_from("llama-7b")
    layout = even_layout(model.num_layers, dp=num_ranks, pp=pp)
    devices = -(-num_ranks * pp // 8) * 8
    return PackCosts(model, analytic_coefficients(model, cluster_from(f"h100x{devices}"), layout), layout)


COSTS = {num_ranks: costs_of(num_ranks) for num_ranks in (1, 2, 4, 6, 8)}


@given(
    num_ranks=st.sampled_from(sorted(COSTS)),
    lengths=st.lists(st.integers(1, 4096), min_size=4, max_size=40),
    multiple=st.sampled_from([None, 1, 2, 4]),
    most=st.sampled_from([None, 3]),
    base=st.sampled_from([MegatronScheduler, FailingScheduler]),
)
def test_answers_are_what_megatron_takes(num_ranks, lengths, multiple, most, base):
    scheduler = scheduler_class(base, COSTS[num_ranks])(4096, 1, num_ranks, multiple, max_num_seqs=most)
    pairs = [(100 + 7 * index, tokens) for index, tokens in enumerate(lengths)]
    require_valid(scheduler.get_groups_and_subsamples(pairs), pairs, scheduler)


def test_a_document_beyond_one_rank_is_shared_by_as_many_as_it_needs():
    scheduler = scheduler_class(MegatronScheduler, COSTS[8])(4096, 1, 8, None)
    pairs = [(0, 16384), *((name, 4000) for name in range(1, 5))]
    answer = scheduler.get_groups_and_subsamples(pairs)
    require_valid(answer, pairs, scheduler)
    assert [name for rank in answer[0] for name in rank].count(0) >= 4


def test_a_document_that_no_group_holds_is_refused():
    scheduler = scheduler_class(MegatronScheduler, COSTS[2])(64, 1, 2, None)
    with pytest.raises(InfeasiblePlanError, match="200 tokens"):
        scheduler.get_groups_and_subsamples([(0, 200), (1, 3)])


def test_fewer_documents_than_micro_batches_are_refused():
    scheduler = scheduler_class(FailingScheduler, COSTS[2])(64, 1, 2, 4)
    with pytest.raises(InfeasiblePlanError, match="multiple of 4"):
        scheduler.get_groups_and_subsamples([(0, 20), (1, 3)])


class Generous(MegatronScheduler):
    """Knows no limit of tokens, and so needs fewer micro-batches than anybody who does."""

    def get_groups_and_subsamples(self, sample_id_seqlens):
        names = [name for name, _ in sample_id_seqlens]
        return [[names[rank :: self.dp_size] for rank in range(self.dp_size)]]


def test_megatrons_own_answer_is_taken_where_it_is_faster():
    pairs = [(name, 100) for name in range(8)]
    theirs = scheduler_class(Generous, COSTS[2])(100, 1, 2, None).get_groups_and_subsamples(pairs)
    assert theirs == [[[0, 2, 4, 6], [1, 3, 5, 7]]]
    own = scheduler_class(MegatronScheduler, COSTS[2])(100, 1, 2, None).get_groups_and_subsamples(pairs)
    assert len(own) == 4


def prices(lengths, num_ranks, room=100, pack_s=1.0):
    """A document takes its tokens over its ranks in seconds."""
    sizes = group_sizes(num_ranks)
    tokens = np.array(lengths)
    seconds = np.array([tokens / size for size in sizes])
    return GroupPrices(
        num_tokens=tokens, sizes=sizes, seconds=seconds, pack_s=pack_s, num_ranks=num_ranks, room_tokens=room
    )


def test_step_seconds_by_hand():
    """Two ranks share 40 tokens (20 s + 1), then rank 0 runs 10 (11 s) and rank 1 30 (31 s); then both wait for
    rank 1 to share 8 more (4 s + 1)."""
    micro_batches = (((0,), (0,)), ((1,), (2,)), ((3,), (3,)))
    assert step_seconds(prices([40, 10, 30, 8], 2), micro_batches) == 21 + 31 + 5


def test_short_documents_of_a_group_are_cut_whatever_the_costs_say():
    """Megatron cuts every document of a group into two chunks a rank; Evenload's runtime keeps short ones whole."""
    costs = COSTS[4]
    cut = PackCosts(costs.model, costs.coefficients, costs.layout, keeps_short_whole=False)
    assert costs.keeps_short_whole
    found, expected = (group_prices(one, [8, 100, 4000], (1, 2, 4), 4096) for one in (costs, cut))
    assert (found.seconds == expected.seconds).all()
    # Of 8 tokens on 4 ranks each has two slices of one token, not a fourth of the ranks one slice.
    rows = np.array([8]), np.array([4])
    assert cut.features.is_sharded(*rows).all()
    assert not costs.features.is_sharded(*rows).any()


def test_a_pipeline_adds_its_longest_micro_batch_once_a_stage():
    one = prices([40, 10], 2)
    three = GroupPrices(**{name: getattr(one, name) for name in one.__dataclass_fields__} | {"stages": 3})
    micro_batches = (((0,), (1,)),)
    assert step_seconds(one, micro_batches) == 41
    assert step_seconds(three, micro_batches) == 41 + 2 * 41


def test_equal_documents_stay_whole_on_their_ranks():
    """Sharing costs nothing here, but as many micro-batches of everything would each cost a constant."""
    assert plan_context_groups(prices([50, 50, 50, 50], 4)) == (((0,), (1,), (2,), (3,)),)


def test_one_long_document_is_shared_and_the_short_ones_follow():
    plan = plan_context_groups(prices([200, 40, 40], 2))
    assert plan[0] == ((0,), (0,))
    assert sorted(plan[1]) == [(1,), (2,)]


def test_group_sizes_divide_each_other_and_all_ranks():
    assert group_sizes(8) == (1, 2, 4, 8)
    assert group_sizes(6) == (1, 2, 6)
    assert group_sizes(8, least=2) == (2, 4, 8)
    assert group_sizes(1) == (1,)


@pytest.mark.parametrize("enumerated", [False, True])
def test_it_takes_the_place_of_megatrons_scheduler_once(monkeypatch, enumerated):
    module = data_schedule_module(enumerated=enumerated)
    for name in ("megatron", "megatron.core", "megatron.core.datasets"):
        monkeypatch.setitem(sys.modules, name, type(module)(name))
    monkeypatch.setitem(sys.modules, "megatron.core.datasets.data_schedule", module)
    sys.modules["megatron.core.datasets"].data_schedule = module
    register_scheduler(COSTS[2])
    classes = {getattr(key, "value", key): value for key, value in module.scheduler_map.items()}
    assert classes["dp_balanced"] is MegatronScheduler
    assert issubclass(classes["default_dynamic_cp"], MegatronScheduler)
    assert classes["default_dynamic_cp"] is not MegatronScheduler
    with pytest.raises(ConfigError, match="once"):
        register_scheduler(COSTS[2])
    with pytest.raises(ConfigError, match="dp=4"):
        classes["default_dynamic_cp"](64, 2, 2, None).get_groups_and_subsamples([(0, 10)])


@pytest.mark.parametrize(("tp", "pp"), [(1, 2), (2, 1)])
def test_ranks_with_other_costs_are_refused_on_all_of_them(gloo_pool, tp, pp):
    """Of another stage or tensor rank, too: its groups would be other ones."""
    plans = gloo_pool.run(4, run_on_ranks, tp, pp, -1)
    assert plans[0]
    assert plans == plans[:1] * 4
    for message in gloo_pool.run(4, run_on_ranks, tp, pp, 3):
        assert "other costs on some ranks than on others" in message
        assert "read one cost file on every rank" in message


def test_everything_that_costs_are_made_of_is_compared(gloo_pool):
    for message in gloo_pool.run(2, run_on_ranks, 1, 1, 1, "keeps_short_whole"):
        assert "other costs on some ranks than on others" in message


def test_released_versions_without_schedulers_are_named():
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    with pytest.raises(ConfigError, match="megatron_step"):
        register_scheduler(COSTS[2])
