"""Megatron-Core's `BalancedCPScheduler` with our division: its contract and its time.

The tests against the release need its files alone (`make test-engines`), not what it imports.
"""

import importlib.util
import sys
from importlib import metadata
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenload.errors import ConfigError, DataError
from evenload.planning.micro_batches import Cost
from evenload.seams import megatron as seam
from seam_cases import MICRO_BATCH_S, work_s

MODULE = "megatron.core.pipeline_parallel.hybrid_cp_schedule"


def ranks_of(group) -> dict[int, list[int]]:
    """The ranks of every sample of a group."""
    found: dict[int, list[int]] = {}
    for rank, samples in enumerate(group):
        for sample in samples:
            found.setdefault(sample, []).append(rank)
    return found


def step_s(lengths, groups) -> float:
    """Seconds of a step: ranks wait at the end of every group, and each sample is a micro-batch of its ranks."""
    work, total = work_s(lengths), 0.0
    for group in groups:
        sizes = {sample: len(ranks) for sample, ranks in ranks_of(group).items()}
        total += max(sum(work[sample] / sizes[sample] + MICRO_BATCH_S for sample in rank) for rank in group)
    return total


def check(lengths, ranks, max_tokens, groups):
    found = [sample for group in groups for sample in ranks_of(group)]
    assert sorted(found) == list(range(len(lengths)))
    for group in groups:
        assert len(group) == ranks
        assert all(group)
        for sample, of_sample in ranks_of(group).items():
            size, first = len(of_sample), of_sample[0]
            assert size & (size - 1) == 0
            assert first % size == 0
            assert of_sample == list(range(first, first + size))
            assert lengths[sample] <= size * max_tokens
            # In one order on all of them, and none of them changes its partners inside a group.
            assert all(group[rank] == group[first] for rank in of_sample)


@settings(max_examples=150)
@given(
    lengths=st.lists(st.integers(1, 160), min_size=1, max_size=50),
    ranks=st.sampled_from([1, 2, 4, 8, 16]),
    quadratic_s=st.sampled_from([0.0, 0.1]),
    micro_batch_s=st.sampled_from([0.0, 5.0]),
)
def test_every_sample_is_placed_once_on_ranks_that_have_a_process_group(lengths, ranks, quadratic_s, micro_batch_s):
    lengths = [min(length, 20 * ranks) for length in lengths]
    cost = Cost(1.0, quadratic_s, micro_batch_s)
    groups = seam.groups_of(lengths, ranks, 20, cost)
    check(lengths, ranks, 20, groups)
    assert groups == seam.groups_of(lengths, ranks, 20, cost)


def test_the_longest_take_more_ranks_than_they_need():
    """Two on four ranks each would wait for what is left of the third; the 40 short ones run one by one."""
    lengths = [16_384, 16_000, 15_500, *[2_048] * 40]
    groups = seam.groups_of(lengths, 8, 4_096, Cost())
    check(lengths, 8, 4_096, groups)
    even_s = (work_s(lengths).sum() + MICRO_BATCH_S * (3 * 4 + 40)) / 8
    assert step_s(lengths, groups) <= even_s * 1.05


def test_what_cannot_be_placed_is_said():
    with pytest.raises(ConfigError, match="6 ranks of data and context parallelism, must be a power of two"):
        seam.groups_of([4], 6, 4, Cost())
    with pytest.raises(DataError, match=r"samples have 3 to 9 tokens; the least is 1, and 2 ranks hold 4 each"):
        seam.groups_of([3, 9], 2, 4, Cost())
    assert seam.groups_of([], 2, 4, Cost()) == []


class Recorded:
    """The parameters of the release's class."""

    def __init__(self, max_seq_len_per_rank, dp_cp_group):
        self.max_seq_len_per_rank, self.total_hdp_gpus = max_seq_len_per_rank, dp_cp_group.size()

    def get_groups_and_subsamples(self, sample_id_seqlens, config):
        return "theirs"


def release_class(monkeypatch):
    """The release's own, from its file, beside stand-ins for what that imports; skips where it is not installed."""
    try:
        files = metadata.distribution("megatron-core")
    except metadata.PackageNotFoundError:
        pytest.skip("megatron-core is not installed")
    if files.version != "0.19.2":
        pytest.skip(f"megatron-core is {files.version}, not 0.19.2: make test-engines")
    for name in ("megatron", "megatron.core", "megatron.core.parallel_state", "megatron.core.rerun_state_machine"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["megatron.core"].parallel_state = None
    sys.modules["megatron.core.rerun_state_machine"].RerunDataIterator = None
    spec = importlib.util.spec_from_file_location(MODULE, files.locate_file(MODULE.replace(".", "/") + ".py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.BalancedCPScheduler


@pytest.fixture(params=["recorded", "release"])
def scheduler_class(request, monkeypatch):
    owner = release_class(monkeypatch) if request.param == "release" else type("Copy", (), dict(vars(Recorded)))
    monkeypatch.setitem(sys.modules, MODULE, SimpleNamespace(BalancedCPScheduler=owner))
    monkeypatch.setattr("evenload.seams.replacing.version", lambda package: "0.19.2")
    return owner


def test_the_schedulers_method_is_replaced_and_taken_back(scheduler_class):
    theirs = scheduler_class.get_groups_and_subsamples
    scheduler = scheduler_class(20, SimpleNamespace(size=lambda: 4))
    samples = [(100 + at, length) for at, length in enumerate([70, 30, 12, 12, 9, 9, 5, 2, 2, 1])]
    with seam.install():
        with pytest.raises(ConfigError, match="is replaced already"):
            seam.install()
        groups, ids = scheduler.get_groups_and_subsamples(samples, None)
        few = scheduler.get_groups_and_subsamples(samples[:3], None)
    assert scheduler_class.get_groups_and_subsamples is theirs
    assert few == scheduler.get_groups_and_subsamples(samples[:3], None)  # fewer than ranks
    check([length for _, length in samples], 4, 20, [[[one - 100 for one in rank] for rank in group] for group in ids])
    assert groups == [[[dict(samples)[one] for one in rank] for rank in group] for group in ids]


@pytest.mark.parametrize(("ranks", "num_samples"), [(8, 64), (8, 512), (32, 512)])
@pytest.mark.parametrize("max_tokens", [4_096, 8_192, 16_384])
def test_a_step_takes_no_longer_than_with_the_releases_own_groups(monkeypatch, ranks, num_samples, max_tokens):
    scheduler = release_class(monkeypatch)(max_tokens, SimpleNamespace(size=lambda: ranks))
    for seed in range(3):
        lengths = np.random.default_rng(seed).lognormal(6.5, 1.5, num_samples)
        lengths = np.clip(lengths, 8, min(ranks * max_tokens, 65_536)).astype(int).tolist()
        _, theirs = scheduler.get_groups_and_subsamples(list(enumerate(lengths)), None)
        check(lengths, ranks, max_tokens, theirs)
        assert step_s(lengths, seam.groups_of(lengths, ranks, max_tokens, Cost())) <= step_s(lengths, theirs)


def test_other_releases_are_refused(monkeypatch):
    monkeypatch.setattr("evenload.seams.replacing.version", lambda package: "0.16.1")
    with pytest.raises(ConfigError, match=r"megatron-core is 0.16.1, this seam was tested with 0.19.2"):
        seam.install()
