"""`prepare_batch` of prime-rl: every trainer gets equally many micro-batches, of one modality at every index."""

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

import prime_rl_shim as shim
from evenload.errors import ConfigError
from evenload.planning.micro_batches import Cost
from evenload.seams import prime_rl


@pytest.fixture(autouse=True, scope="module")
def stand_in():
    with pytest.MonkeyPatch.context() as patch:
        for name, module in shim.modules().items():
            patch.setitem(sys.modules, name, module)
        yield


def flops(lengths):
    return 20_000 * sum(lengths) + sum(length**2 for length in lengths)


def batch_of(lengths, seq_len, workers, images=(), multiple=1):
    samples = [shim.sample_of(length, at in images) for at, length in enumerate(lengths)]
    return prime_rl.prepare_batch(samples, seq_len, workers, flops, multiple)


def test_the_stand_in_builds_what_prime_rl_builds():
    """prime-rl 559b4477 returned this for two samples of 5 and 2 tokens, `seq_len=4`, one trainer, padded to 4."""
    (first,), (second,) = zip(*batch_of([5, 2], 4, 1, multiple=4), strict=True)
    assert (first.input_ids, first.loss_mask) == ([100, 101, 102, 103], [False, True, True, True])
    assert (second.input_ids, second.loss_mask) == ([100, 101, 1, 1], [False, True, False, False])
    assert (first.position_ids, second.position_ids) == ([0, 1, 2, 3], [0, 1, 0, 1])
    assert (first.sequence_lengths, second.sequence_lengths) == ([4], [4])
    assert (first.advantages, second.advantages) == ([0.5] * 4, [0.5, 0.5, 0.0, 0.0])


@given(
    lengths=st.lists(st.integers(2, 40), min_size=1, max_size=30),
    seq_len=st.integers(8, 64),
    workers=st.integers(1, 4),
    images=st.sets(st.integers(0, 29), max_size=5),
    multiple=st.sampled_from([1, 8]),
)
def test_the_contract_is_kept(lengths, seq_len, workers, images, multiple):
    made = batch_of(lengths, seq_len, workers, images, multiple)
    assert len({len(of_worker) for of_worker in made}) == 1
    for at_index in zip(*made, strict=True):
        assert len({micro_batch.mm_kwargs is None for micro_batch in at_index}) == 1
    everything = [micro_batch for of_worker in made for micro_batch in of_worker]
    for micro_batch in everything:
        assert len(micro_batch.input_ids) % multiple == 0
        assert len(micro_batch.input_ids) <= -(-seq_len // multiple) * multiple
    trained = [sum(micro_batch.loss_mask) for micro_batch in everything if any(micro_batch.loss_mask)]
    assert sum(trained) == sum(min(length, seq_len) - 1 for length in lengths)
    idle = len(everything) - len(trained)
    if len(lengths) >= workers * len(made[0]) and not images:
        assert idle == 0
    assert not any(any(one.advantages) for one in everything if not any(one.loss_mask))


def test_copies_that_train_nothing_make_up_for_too_few_samples():
    """Five samples that fill a micro-batch each, two trainers."""
    made = batch_of([8] * 5, 8, 2)
    assert [len(of_worker) for of_worker in made] == [3, 3]
    assert sum(not any(one.loss_mask) for of_worker in made for one in of_worker) == 1


def test_heavy_ones_meet():
    """What prime-rl 559b4477 returns for these takes 1.16 of equal shares."""
    lengths = [4_000, 3_900, *[400] * 24, *[1_000] * 10]
    made = batch_of(lengths, 4_096, 2)
    seconds = [[sum(flops([one]) for one in each.sequence_lengths) for each in of_worker] for of_worker in made]
    waits = sum(map(max, zip(*seconds, strict=True)))
    assert waits <= 1.03 * sum(map(sum, seconds)) / 2


def test_it_is_installed_and_removed():
    theirs = sys.modules[shim.MODULE].prepare_batch
    samples = [shim.sample_of(length) for length in (5, 3, 4)]
    with prime_rl.install(Cost(1e-6, 1e-10, 1e-3)):
        made = sys.modules[shim.MODULE].prepare_batch(rollouts=samples, seq_len=8, num_train_workers=1, bin_cost=flops)
        assert sorted(len(one.input_ids) for one in made[0]) == [5, 7]
    assert sys.modules[shim.MODULE].prepare_batch is theirs


def test_a_release_that_builds_otherwise_is_refused(monkeypatch):
    monkeypatch.delattr(sys.modules[shim.MODULE], "_materialize_bin")
    with pytest.raises(ConfigError, match=r"there is no prime_rl.trainer.batch._materialize_bin; .* prime-rl 559b4477"):
        prime_rl.install()
