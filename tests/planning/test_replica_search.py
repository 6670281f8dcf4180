"""The core's trials equal their Python reference: the same packs, the same scores to the last bit."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_samples import sample_coefficients, sample_model
from evenload.cost.pack_cost import PackCosts
from evenload.planning.candidates import (
    CUTS,
    TAPERS,
    Order,
    ReplicaSearch,
    Setting,
    Trial,
    cut_rules,
    score,
    trial_packs,
)
from evenload.planning.problem import PlanOptions, StepProblem
from evenload.types.cluster import LinkSpec
from evenload.types.layout import even_layout
from evenload.types.tree_columns import NO_TREES
from reference.cuts import cut_packs
from reference.trial_scores import score_of

LINK = LinkSpec(bandwidth_bytes_per_s=500.0, latency_s=0.1)


def problem_of(
    num_tokens: list[int],
    *,
    limit: int | None = None,
    low: int = 1,
    pp: int = 3,
    virtual: int = 1,
    windows: tuple[int, ...] = (),
    tile: int = 1,
    policy: np.ndarray | None = None,
    cap: int | None = None,
    dp: int = 1,
) -> StepProblem:
    coefficients = sample_coefficients(
        attention_tile=tile, host_link=LINK, intra_node=LINK, inter_node=LINK, devices_per_node=8
    )
    costs = PackCosts(
        sample_model(num_layers=6, sliding_windows=windows), coefficients, even_layout(6, dp=dp, pp=pp, virtual=virtual)
    )
    return StepProblem(
        np.arange(len(num_tokens)),
        np.array(num_tokens, np.int64),
        costs,
        None if cap is None else np.full(pp, cap, np.int64),
        PlanOptions(max_pack_tokens=limit, min_slice_tokens=low),
        policy,
    )


SETTINGS = st.builds(
    Setting,
    cut=st.sampled_from(CUTS),
    num_packs=st.integers(1, 24),
    token_weight=st.integers(1, 2),
    taper=st.sampled_from(TAPERS),
)
LENGTHS = st.lists(st.one_of(st.integers(1, 40), st.integers(1, 700)), min_size=1, max_size=14)
PROBLEMS = {
    "limit": st.sampled_from([None, 64, 300]),
    "low": st.sampled_from([1, 5]),
    "windows": st.sampled_from([(), (0, 16, 0, 16, 0, 16), (32,) * 6]),
    "tile": st.sampled_from([1, 4]),
}


@settings(max_examples=300, deadline=None)
@given(LENGTHS, SETTINGS, st.fixed_dictionaries(PROBLEMS))
def test_cuts_equal_their_reference(num_tokens: list[int], setting: Setting, changes: dict) -> None:
    """Every cut, with windows, tiles, token limits, least slices, token weights and tapered ends."""
    problem = problem_of(num_tokens, **changes)
    rules = cut_rules(problem)
    core = trial_packs(problem, rules, problem.num_tokens, setting, 1)
    reference = cut_packs(rules, problem.num_tokens, setting)
    assert (core is None) == (reference is None)
    if core and reference:
        for one, other in zip(core, reference, strict=True):
            for name in ("pack_offset", "doc", "start", "stop"):
                np.testing.assert_array_equal(getattr(one, name), getattr(other, name), name)


TRIALS = st.builds(
    Trial, setting=SETTINGS, order=st.sampled_from(Order), lookahead=st.sampled_from([None, 0, 3]), split=st.booleans()
).filter(lambda trial: not (trial.order.is_static and trial.split))


@settings(max_examples=150, deadline=None)
@given(
    LENGTHS,
    st.lists(TRIALS, min_size=1, max_size=12),
    st.sampled_from([(1, 1), (3, 1), (3, 2)]),
    st.sampled_from([None, 60_000, 120_000]),
    st.booleans(),
    st.sampled_from([None, 2]),
)
def test_scores_equal_their_reference(
    num_tokens: list[int],
    trials: list[Trial],
    stages: tuple[int, int],
    cap: int | None,
    policies: bool,
    ranks: int | None,
) -> None:
    """Schedules, memory limits, policies, virtual stages, shared documents; several threads."""
    pp, virtual = stages
    policy = np.arange(len(num_tokens), dtype=np.int8) % 3 if policies else None
    problem = problem_of(num_tokens, pp=pp, virtual=virtual, cap=cap, policy=policy, limit=400, dp=2)
    search = ReplicaSearch(problem, np.arange(len(num_tokens)), ranks)
    score([(search, trials)])
    assert set(search.scores) == set(trials)
    for trial, result in search.scores.items():
        expected = score_of(search, trial)
        assert (result is None) == (expected is None)
        if result and expected:
            assert result[:2] == expected[:2]
            assert result[2:] == pytest.approx(expected[2:], rel=1e-12)


def test_the_best_trial_is_built_as_it_was_rated() -> None:
    """A plan must keep what its score promised."""
    lengths = np.random.default_rng(3).lognormal(3, 1.2, 50).astype(int) + 1
    problem = problem_of(lengths.tolist(), cap=200_000)
    search = ReplicaSearch(problem, np.arange(50))
    score([(search, [Trial(Setting(cut, 12), split=split) for cut in CUTS for split in (False, True)])])
    for trial in search.ranking():
        candidate, rated = search.build(trial), search.scores[trial]
        assert candidate is not None
        assert rated is not None
        assert candidate.score() == rated[:2]


@pytest.mark.parametrize("field", ["cut", "order", "count"])
def test_the_core_refuses_trials_it_does_not_know(field: str) -> None:
    """Numbers out of range would read memory or run another trial."""
    from evenload import _native
    from evenload.planning.candidates import ALIGN_FROM_TILES, NO_TOKEN_LIMIT, trial_rows

    problem = problem_of([5, 9, 30])
    rows = trial_rows([Trial(Setting("whole", 2))])
    rows[0, {"cut": 0, "count": 1, "order": 5}[field]] = -1
    curves = cut_rules(problem).native_curves()
    with pytest.raises(ValueError, match=field):
        _native.score_trials(
            problem.costs.native,
            [(problem.num_tokens, NO_TREES.arrays(), np.empty(0, np.int8), 1, rows)],
            *curves,
            np.empty(0, np.int64),
            1,
            NO_TOKEN_LIMIT,
            ALIGN_FROM_TILES,
            1,
        )
