"""`evenload.micro_batches`: every rule is kept, the step is near its bound, the core equals its twin."""

import dataclasses
import itertools
import math
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import assume, given, reject, settings
from hypothesis import strategies as st

from evenload import _native
from evenload.errors import ConfigError, DataError, InfeasiblePlanError
from evenload.planning.micro_batches import Cost, micro_batches
from reference.micro_batches import Problem
from reference.micro_batches import micro_batches as reference

lengths = st.lists(st.integers(1, 40), max_size=30)
NO_LIMIT = 2**62


def documents(made) -> list[int]:
    return sorted(document for rank in made.ranks for micro_batch in rank for document in micro_batch)


@settings(deadline=None)
@given(
    num_tokens=lengths,
    ranks=st.integers(1, 4),
    max_tokens=st.integers(40, 120),
    max_items=st.sampled_from([2, 5, NO_LIMIT]),
    multiple=st.integers(1, 2),
    is_placed=st.booleans(),
    waits_at_each=st.booleans(),
    no_empty=st.booleans(),
    quadratic=st.sampled_from([0.0, 0.1]),
    most_trials=st.sampled_from([0, 50, 10_000]),
)
def test_the_core_equals_its_twin(num_tokens, ranks, is_placed, quadratic, **settings):
    work_s = [tokens + quadratic * tokens**2 for tokens in num_tokens]
    rank_of = [(7 * at) % ranks for at in range(len(num_tokens))] if is_placed else []
    counts = {"micro_batch_s": 3.0, "least": 1, "most": 40}
    problem = Problem(num_tokens, work_s, rank_of, ranks, **settings, **counts)
    given = dataclasses.asdict(problem) | {
        "num_tokens": np.array(num_tokens, np.int64),
        "work_s": np.array(work_s, np.float64),
        "rank_of": np.array(rank_of, np.int64),
    }
    count, rank, index = _native.micro_batches(**given)
    assert (count, rank.tolist(), index.tolist()) == reference(problem)


@settings(deadline=None)
@given(
    num_tokens=lengths,
    ranks=st.integers(1, 4),
    max_tokens=st.integers(40, 100),
    waits=st.sampled_from(["micro_batch", "step"]),
    count_multiple=st.integers(1, 3),
    max_documents=st.sampled_from([1, 3, None]),
    document_multiple=st.sampled_from([1, 8]),
    token_multiple=st.sampled_from([1, 16]),
)
def test_every_rule_is_kept(num_tokens, ranks, max_tokens, **rules):
    padded = [-(-tokens // rules["document_multiple"]) * rules["document_multiple"] for tokens in num_tokens]
    held = max_tokens // rules["token_multiple"] * rules["token_multiple"]
    assume(max(padded, default=1) <= held)
    made = micro_batches(num_tokens, ranks, max_tokens, **rules)
    assert documents(made) == list(range(len(num_tokens)))
    counts = {len(rank) for rank in made.ranks}
    assert len(counts) == 1
    assert counts.pop() % rules["count_multiple"] == 0
    for micro_batch in itertools.chain.from_iterable(made.ranks):
        assert sum(padded[document] for document in micro_batch) <= held
        assert len(micro_batch) <= (rules["max_documents"] or math.inf)
    by_index = made.seconds.max(axis=0).sum() if rules["waits"] == "micro_batch" else made.seconds.sum(axis=1).max()
    assert made.step_s == pytest.approx(by_index)
    assert made.bound_s <= made.step_s * (1 + 1e-9)
    for rank, micro_batch in itertools.product(range(ranks), range(made.seconds.shape[1])):
        assert all(
            made.rank_of[one] == rank and made.index_of[one] == micro_batch for one in made.ranks[rank][micro_batch]
        )


@settings(deadline=None)
@given(num_tokens=st.lists(st.integers(1, 9), min_size=1, max_size=5), ranks=st.integers(1, 2))
def test_small_steps_are_near_the_best_of_all_divisions(num_tokens, ranks):
    """Longest first alone is within 4/3 of one index's best; exchanges and several counts only shorten that."""
    cost = Cost(linear_s=1.0, quadratic_s=0.1, micro_batch_s=0.5)
    made = micro_batches(num_tokens, ranks, 12, cost=cost)
    work = cost.work_s(np.array(num_tokens))
    best = math.inf
    for count in range(1, len(num_tokens) + 1):
        for slots in itertools.product(range(ranks * count), repeat=len(num_tokens)):
            tokens = np.bincount(slots, num_tokens, ranks * count)
            if tokens.max() <= 12:
                seconds = np.bincount(slots, work, ranks * count).reshape(ranks, count)
                best = min(best, seconds.max(axis=0).sum() + count * 0.5)
    assert best * (1 - 1e-9) <= made.step_s <= best * 4 / 3
    assert made.bound_s <= best * (1 + 1e-9)


@settings(deadline=None)
@given(
    num_tokens=lengths, ranks=st.integers(1, 4), seed=st.integers(0, 99), keep=st.sampled_from(["rank", "micro_batch"])
)
def test_groups_stay_together(num_tokens, ranks, seed, keep):
    groups = np.random.default_rng(seed).integers(0, 8, len(num_tokens))
    made = micro_batches(num_tokens, ranks, 2_000, groups=groups, keep=keep)
    assert documents(made) == list(range(len(num_tokens)))
    for group in set(groups.tolist()):
        members = groups == group
        assert len(set(made.rank_of[members].tolist())) == 1
        if keep == "micro_batch":
            assert len(set(made.index_of[members].tolist())) == 1


@settings(deadline=None)
@given(num_tokens=st.lists(st.integers(1, 40), min_size=0, max_size=24), ranks=st.integers(1, 4))
def test_equal_documents_and_placed_documents(num_tokens, ranks):
    num_tokens = num_tokens[: len(num_tokens) // ranks * ranks]
    made = micro_batches(num_tokens, ranks, 60, equal_documents=True)
    assert set(Counter(made.rank_of.tolist()).values()) <= {len(num_tokens) // ranks}
    again = micro_batches(num_tokens, ranks, 60, rank_of=made.rank_of)
    assert again.rank_of.tolist() == made.rank_of.tolist()


def test_equal_documents_of_equal_works_where_those_that_meet_do_not_fit():
    made = micro_batches([6, 10, 4, 10, 5, 5, 2, 5, 9, 3], 2, 10, equal_documents=True, count=3)
    assert np.bincount(made.rank_of).tolist() == [5, 5]


@settings(deadline=None)
@given(
    num_tokens=st.lists(st.integers(1, 40), min_size=8, max_size=30),
    ranks=st.integers(1, 4),
    max_tokens=st.integers(40, 100),
    is_placed=st.booleans(),
    waits=st.sampled_from(["micro_batch", "step"]),
    multiple=st.integers(1, 2),
)
def test_no_micro_batch_is_empty(num_tokens, ranks, max_tokens, is_placed, waits, multiple):
    placed = {"rank_of": [at % ranks for at in range(len(num_tokens))]} if is_placed else {}
    rules = {"waits": waits, "count_multiple": multiple, "no_empty": True, **placed}
    try:
        made = micro_batches(num_tokens, ranks, max_tokens, **rules)
    except InfeasiblePlanError:  # multiples of the fewest documents of a rank may be too few for the tokens
        reject()
    assert documents(made) == list(range(len(num_tokens)))
    assert all(micro_batch for rank in made.ranks for micro_batch in rank)
    assert len(made.ranks[0]) % multiple == 0


def test_more_micro_batches_than_documents_are_refused_where_none_may_be_empty():
    with pytest.raises(InfeasiblePlanError, match=r"no division found of 4 documents .* none of them empty"):
        micro_batches([5, 5, 9, 9], 2, 10, rank_of=[0, 0, 0, 1], no_empty=True, count_multiple=2)
    assert micro_batches([5, 5, 9, 9], 2, 10, no_empty=True, count_multiple=2).seconds.shape == (2, 2)


def test_equal_documents_look_at_what_meets_too():
    """Long documents on one rank with many short ones have equal works with others, and nobody to meet."""
    rng = np.random.default_rng(0)
    num_tokens = np.minimum(rng.lognormal(7.5, 1.6, 512).astype(np.int64) + 1, 65_536)
    made = micro_batches(num_tokens, 8, 65_536, equal_documents=True, no_empty=True)
    even = micro_batches(num_tokens, 8, equal_documents=True, waits="step").rank_of
    assert np.bincount(made.rank_of).tolist() == np.bincount(even).tolist() == [64] * 8
    assert made.step_s < 0.97 * micro_batches(num_tokens, 8, 65_536, rank_of=even).step_s


def test_micro_batches_that_may_not_be_empty_get_the_shortest_documents_last():
    """Exchanges that have to leave a document in each find divisions that take 1.38 of the bound here."""
    made = micro_batches([1_000, 500, 1, 1, 9, 9], 2, count=3, no_empty=True, cost=Cost(1.0, 0.0, 0.0))
    assert made.step_s == 1_000 + 1 + 9  # short ones of like length meet
    random = np.random.default_rng(0)
    long = random.random(512) < 0.05
    num_tokens = np.where(long, random.integers(8_000, 32_000, 512), random.integers(50, 600, 512))
    made = micro_batches(num_tokens, 16, count=4, no_empty=True)
    assert made.step_s <= made.bound_s * 1.05


def test_heavy_micro_batches_meet():
    """Two long documents and 62 short ones on two ranks: the long ones share an index, nobody waits long."""
    made = micro_batches([30_000, 28_000, *[1_000] * 62], 2, 32_768)
    assert made.index_of[0] == made.index_of[1]
    assert made.rank_of[0] != made.rank_of[1]
    assert made.step_s <= made.bound_s * 1.03


def test_a_document_beyond_the_limit_is_refused_or_alone():
    with pytest.raises(DataError, match=r"document 1 takes 70 tokens, a micro-batch holds 64"):
        micro_batches([10, 70, 20], 1, 64)
    made = micro_batches([10, 70, 20], 1, 64, too_long="alone")
    assert sorted(map(sorted, made.ranks[0])) == [[0, 2], [1]]


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"wait": "step"}, "evenload.micro_batches has no 'wait'; did you mean 'waits'"),
        ({"waits": "never"}, "waits is 'never'"),
        ({"count": 0}, "count is 0, must be a whole number"),
        ({"count": 3, "count_multiple": 2}, "count is 3, must be a multiple of count_multiple = 2"),
        ({"count": 1, "min_count": 2}, "count is 1, must be at least min_count = 2"),
        ({"token_multiple": 100}, "token_multiple is 100, must be at most max_tokens = 64"),
        ({"equal_documents": "no"}, "equal_documents is 'no', must be True or False"),
        ({"max_documents": 2**63}, r"max_documents is 9223372036854775808, .* \(2\*\*62 at most\)"),
        ({"work_s": [1.0]}, "work_s must be one row of finite numbers of 3"),
        ({"work_s": [1.0, math.nan, 2.0]}, "work_s holds nan s for document 1"),
        ({"work_s": [[1.0], [2.0, 3.0]]}, "work_s cannot be read as a row of numbers"),
        ({"cost": Cost(1e300)}, "cost predicts .* s for document 0"),
        ({"groups": [1, 2]}, "groups must be one row of whole numbers of 3"),
        ({"rank_of": [0, 1, 2]}, "rank_of holds 0 to 2, ranks are 0 to 1"),
        ({"rank_of": [0, 1, 1], "equal_documents": True}, "rank_of places every document"),
        ({"equal_documents": True}, "3 documents are no 2 equal shares"),
        ({"groups": [0, 0, 1], "keep": "micro_batch", "max_documents": 2}, "max_documents counts no groups"),
        ({"cost": "lama-7b"}, "cost: model 'lama-7b' is no built-in name .*did you mean 'llama-7b'"),
        ({"cost": 3}, r"cost is 3, must be a Cost\("),
    ],
)
def test_wrong_rules_are_named(rules, message):
    with pytest.raises(ConfigError, match=message):
        micro_batches([3, 4, 5], 2, 64, **rules)


def test_a_models_name_is_a_cost():
    """`Cost()` is llama-7b's on eight H100s, rounded; a window makes long documents cheaper than the square."""
    num_tokens = [100, 3_000, 16_000, 50, 700, 900]
    named, default = (micro_batches(num_tokens, 8, 16_384, cost=cost, count=1) for cost in ("llama-7b", Cost()))
    assert named.seconds.sum() == pytest.approx(default.seconds.sum(), rel=0.01)
    short, long = (micro_batches([length], 1, cost="gemma3-4b", count=1).step_s for length in (16_384, 32_768))
    assert 2 < long / short < 3


def test_wrong_lengths_and_counts_are_named():
    with pytest.raises(DataError, match=r"lengths\[1\] is 0, must be at least 1"):
        micro_batches([3, 0], 2)
    with pytest.raises(ConfigError, match="lengths must be one row of whole numbers"):
        micro_batches([3.5, 4.0], 2)
    with pytest.raises(
        InfeasiblePlanError, match=r"no division found of 4 documents .* 1 ranks with 2 micro-batches of 16 tokens"
    ):
        micro_batches([10] * 4, 1, 16, count=2)
    with pytest.raises(ConfigError, match="ranks is None, must be"):
        micro_batches([3], None)
    with pytest.raises(ConfigError, match="linear_s is 'x', must be a finite number"):
        Cost("x")
    with pytest.raises(ConfigError, match="lengths holds 9223372036854775809, more than"):
        micro_batches(np.array([2**63 + 1, 3], np.uint64), 2)
    empty = micro_batches([], 2)
    assert empty.ranks == [[[]], [[]]]


def test_numbers_of_numpy_are_numbers():
    made = micro_batches([100, 200, 300] * 5, np.int32(4), np.int16(1_638), count_multiple=np.uint64(1))
    assert made.step_s == micro_batches([100, 200, 300] * 5, 4, 1_638).step_s


def test_more_micro_batches_are_never_longer_than_empty_ones_after_fewer():
    num_tokens = [2523, 4118, 343, 546, 722, 559, 903, 2342, 1425, 2526, 2955, 1776]
    one = micro_batches(num_tokens, 4, 32_768, count=1).step_s
    for rules in ({"count": 2}, {"min_count": 2}, {"count_multiple": 2}):
        made = micro_batches(num_tokens, 4, 32_768, **rules)
        assert made.seconds.shape == (4, 2)
        assert made.step_s <= one + Cost().micro_batch_s
    assert micro_batches(num_tokens, 4, count=5_000).seconds.shape == (4, 5_000)


def test_ranks_of_equal_works_give_way_where_micro_batches_cannot_hold_theirs():
    tokens = [523, 1864, 7604, 298, 241, 241, 13031, 1123, 1387, 624, 527, 160, 1786, 1970, 169, 470]
    made = micro_batches(tokens, 2, 16_384, count=1, waits="step")
    assert max(sum(tokens[at] for at in rank[0]) for rank in made.ranks) <= 16_384
    made = micro_batches([4500, 9000, 3500, 2500], 2, count=2, waits="step", no_empty=True)
    assert all(len(one) == 1 for rank in made.ranks for one in rank)
    cost = Cost(1e-5, 0, 0)
    made = micro_batches([6000, 2500, 6500, 7000, 9000, 4500], 2, 10_800, count=2, equal_documents=True, cost=cost)
    assert np.bincount(made.rank_of).tolist() == [3, 3]
    with pytest.raises(InfeasiblePlanError, match=r"no_empty: there are 2 documents \(or groups\) for 4 ranks"):
        micro_batches([1, 1], 4, 2, groups=[0, 1], no_empty=True)


def test_equal_lengths_need_no_search_for_a_count():
    made = micro_batches([34] * 4_900, 1, 100)
    assert made.seconds.shape == (1, 2_450)


def test_it_needs_numpy_and_few_of_our_modules():
    code = (
        "import sys\n"
        "class Blocked:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('torch', 'pyarrow', 'msgspec', 'rich', 'typer', 'jinja2', 'fsspec'):\n"
        "            raise ImportError(name)\n"
        "sys.meta_path.insert(0, Blocked())\n"
        "import evenload\n"
        "assert evenload.micro_batches([5, 3, 2], 2).ranks\n"
        "print(sum(name.startswith('evenload') for name in sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= 12
