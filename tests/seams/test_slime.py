"""`build_dp_schedule` of slime and miles: what theirs returned for small batches, and ours, keep one contract."""

import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from evenload.errors import ConfigError, InfeasiblePlanError
from evenload.planning.micro_batches import Cost
from evenload.seams import slime


def case(lengths, ranks, size, rollouts=None, cp=1, stages=1, **args):
    """Arguments of `build_dp_schedule`."""
    named = {"micro_batch_size": 1, "use_dynamic_batch_size": "max_tokens_per_gpu" in args, **args}
    config = {"dp_size": ranks, "cp_size": cp, "vpp_size": stages, "microbatch_group_size_per_vp_stage": stages}
    return {
        "args": SimpleNamespace(balance_data=False, balance_by_flops=False, **named),
        "train_parallel_config": config,
        "total_lengths": lengths,
        "global_batch_size": size,
        "rollout_indices": list(range(len(lengths))) if rollouts is None else rollouts,
    }


SEVERAL = {"lengths": [9, 3, 7, 1, 5, 5, 2, 8, 6, 6], "ranks": 2, "size": 2, "rollouts": [0, 0, 1, 2, 2, 2, 3, 3, 4, 4]}
# What slime 624b824a and miles 31f1ca96 returned.
RECORDED = {
    "fixed": (
        case([9, 3, 7, 1, 5, 5, 2, 8], 2, 8, micro_batch_size=2),
        ([[0, 1, 4, 5], [2, 3, 6, 7]], [[[0, 1], [2, 3]], [[0, 1], [2, 3]]], [2], [8]),
    ),
    "context parallel, slime": (
        case([9, 3, 16, 1, 5, 5, 2, 8, 11, 4], 2, 10, cp=2, max_tokens_per_gpu=8),
        ([[0, 4, 5, 9, 8], [2, 7, 1, 6, 3]], [[[0], [1, 2, 3], [4]], [[0], [1], [2, 3, 4]]], [3], [10]),
    ),
    "context parallel, miles": (
        case([9, 3, 16, 1, 5, 5, 2, 8, 11, 4], 2, 10, cp=2, max_tokens_per_gpu=8),
        ([[2, 0, 5, 6], [8, 4, 7, 9, 1, 3]], [[[0], [1, 2, 3]], [[0, 1], [2, 3, 4, 5]]], [2], [10]),
    ),
    "one longer": (
        case([30, 3, 7, 1, 5, 5], 2, 6, max_tokens_per_gpu=12),
        ([[0, 4, 5], [2, 1, 3]], [[[0], [1, 2]], [[0], [1, 2]]], [2], [6]),
    ),
    "virtual stages": (
        case([9, 3, 7, 1, 5, 5, 2, 8], 2, 8, stages=2, max_tokens_per_gpu=12),
        ([[0, 1, 4, 5], [2, 3, 6, 7]], [[[0, 1], [2, 3]], [[0, 1, 2], [3]]], [2], [8]),
    ),
    "one left over": (
        case(**SEVERAL, max_tokens_per_gpu=12),
        ([[0, 1, 3, 4, 5], [2, 6, 7]], [[[0, 1], [2, 3, 4]], [[0], [1, 2]]], [1, 1], [2, 2]),
    ),
    "a last smaller step, miles": (
        case(**SEVERAL, max_tokens_per_gpu=12, allow_partial_train_step=True),
        ([[0, 1, 7, 6, 3, 8], [2, 4, 5, 9]], [[[0, 1], [2, 3, 4], [5]], [[0], [1, 2], [3]]], [1, 1, 1], [2, 2, 1]),
    ),
}


def step_seconds(given, made) -> float:
    """Check the contract; the predicted seconds of all steps, where ranks wait at every micro-batch."""
    args, config, lengths = given["args"], given["train_parallel_config"], np.array(given["total_lengths"])
    partitions, positions, counts, sizes = made
    ids = list(dict.fromkeys(given["rollout_indices"]))
    steps = [ids[sum(sizes[:at]) : sum(sizes[: at + 1])] for at in range(len(sizes))]
    assert sizes[: len(ids) // given["global_batch_size"]] == [given["global_batch_size"]] * (len(ids) // sizes[0])
    assert all(type(number) is int for number in (*counts, *sizes, *partitions[0], *positions[0][0]))
    total_s, first = 0.0, 0
    for count, rollouts in zip(counts, steps, strict=True):
        assert count % (config["microbatch_group_size_per_vp_stage"] if config["vpp_size"] > 1 else 1) == 0
        trained, seconds = [], np.zeros((config["dp_size"], count))
        for rank, at in np.ndindex(seconds.shape):
            members = [partitions[rank][one] for one in positions[rank][first + at]]
            assert members
            if args.use_dynamic_batch_size:
                limit = args.max_tokens_per_gpu * config["cp_size"]
                assert len(members) == 1 or lengths[members].sum() <= limit
            else:
                assert len(members) <= args.micro_batch_size
            trained += members
            seconds[rank, at] = Cost().work_s(lengths[members]).sum()
        assert sorted(trained) == [at for at, rollout in enumerate(given["rollout_indices"]) if rollout in rollouts]
        total_s += seconds.max(axis=0).sum() + count * Cost().micro_batch_s
        first += count
    for partition, of_rank in zip(partitions, positions, strict=True):
        assert [one for members in of_rank for one in members] == list(range(len(partition)))
        assert len(of_rank) == sum(counts)
    return total_s


@pytest.mark.parametrize("name", RECORDED)
def test_ours_keeps_the_contract_of_theirs(name):
    given, theirs = RECORDED[name]
    ours = slime.build_dp_schedule(**given)
    assert step_seconds(given, ours) <= step_seconds(given, theirs) * (1 + 1e-9)
    assert ours[3] == theirs[3]


@given(
    lengths=st.lists(st.integers(1, 60), min_size=8, max_size=40),
    ranks=st.integers(1, 4),
    stages=st.integers(1, 2),
    cp=st.integers(1, 2),
    experts=st.sampled_from([1, 2]),
    limit=st.integers(10, 80),
    fan_out=st.integers(1, 3),
)
def test_the_contract_is_kept(lengths, ranks, stages, cp, experts, limit, fan_out):
    rollouts = [at // fan_out for at in range(len(lengths))]
    size = max(1, len(set(rollouts)) // 2)
    given = case(
        lengths, ranks, size, rollouts, cp, stages, max_tokens_per_gpu=limit, expert_model_parallel_size=experts
    )
    try:
        made = slime.build_dp_schedule(**given)
    except InfeasiblePlanError:
        reject()  # too few samples, which theirs refuses too
    step_seconds(given, made)


@pytest.mark.parametrize("experts", [1, 8])
def test_ranks_wait_at_every_micro_batch_where_experts_are_shared(experts):
    """Else their whole works are equal, in the fewest micro-batches."""
    lengths = np.minimum(np.random.default_rng(0).lognormal(8, 1.3, 256).astype(int) + 1, 32_768).tolist()
    given = case(lengths, 8, 256, max_tokens_per_gpu=32_768, expert_model_parallel_size=experts)
    made = slime.build_dp_schedule(**given)
    work_s = [Cost().work_s(np.array(lengths)[partition]).sum() for partition in made[0]]
    bound_s = sum(work_s) / 8
    if experts == 1:
        assert max(work_s) <= 1.001 * bound_s
    else:
        assert step_seconds(given, made) <= 1.08 * (bound_s + made[2][0] * Cost().micro_batch_s)


def test_what_theirs_refuses_is_refused():
    with pytest.raises(ConfigError, match="global_batch_size is 4, there are 3 rollouts"):
        slime.build_dp_schedule(**case([5, 5, 5], 1, 4, max_tokens_per_gpu=8))
    with pytest.raises(ConfigError, match="3 micro-batches of micro_batch_size = 3, must be a multiple of 2"):
        slime.build_dp_schedule(**case([5] * 8, 2, 8, micro_batch_size=3))
    with pytest.raises(InfeasiblePlanError, match=r"no division found of 2 documents .* none of them empty"):
        slime.build_dp_schedule(**case([5, 5], 2, 2, stages=2, max_tokens_per_gpu=8))


def build_dp_schedule(args, train_parallel_config, total_lengths, *, global_batch_size, rollout_indices):
    return "theirs"


@pytest.mark.parametrize("name", ["slime.utils.dp_schedule", "miles.utils.dp_schedule"])
def test_it_is_installed_and_removed(name, monkeypatch):
    package = name.split(".")[0]
    for part in (package, f"{package}.utils", name, f"{package}.ray.rollout"):
        monkeypatch.setitem(sys.modules, part, ModuleType(part))
    modules = [sys.modules[name], sys.modules[f"{package}.ray.rollout"]]
    for module in modules:
        module.build_dp_schedule = build_dp_schedule
    given, _ = RECORDED["fixed"]
    with slime.install(name):
        assert [module.build_dp_schedule(**given) for module in modules] == [slime.build_dp_schedule(**given)] * 2
    assert [module.build_dp_schedule(**given) for module in modules] == ["theirs"] * 2
