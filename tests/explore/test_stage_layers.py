import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_samples import reduction_seconds, sample_coefficients, sample_model
from evenload.cost.coefficients import CostCoefficients, PassCoefficients
from evenload.cost.memory import static_bytes
from evenload.cost.pack_cost import PackCosts
from evenload.explore.stage_layers import STATIC_SHARE, balanced_layout
from evenload.types.layout import ParallelLayout, even_layout, split_layout
from evenload.types.model import ModelSpec


def balanced(model, coefficients, lengths, memory_bytes: int | None = None, **sizes: int) -> ParallelLayout:
    even = even_layout(model.num_layers, **sizes)
    return balanced_layout(model, coefficients, even, lengths, memory_bytes=memory_bytes)


def step_seconds(model: ModelSpec, coefficients: CostCoefficients, layout: ParallelLayout, lengths: list[int]) -> float:
    """What a split is judged by, from the costs of its own layout: the slowest rank's documents, then the reduction."""
    costs = PackCosts(model, coefficients, layout)
    tokens, matrix = np.array(lengths), costs.stage_seconds["forward"] + costs.stage_seconds["backward"]
    stage_s = np.zeros(layout.num_stages)
    for stage in range(layout.num_stages):
        one = matrix.copy()
        one[2] = 0.0  # constants of packs
        stage_s[stage] = (costs.features.of_slices(np.zeros_like(tokens), tokens) @ one)[:, stage].sum()
    rank_s = np.zeros(layout.pp)
    np.add.at(rank_s, np.array(layout.stage_to_rank), stage_s)
    return float(rank_s.max()) / layout.dp + reduction_seconds(costs) + costs.optimizer_seconds()


def splits(num_layers: int, stages: int):
    for edges in itertools.combinations(range(1, num_layers), stages - 1):
        yield np.diff([0, *edges, num_layers]).tolist()


def test_head_worth_two_layers_takes_two_layers_from_the_last_stage() -> None:
    """Layers cost 3 s a token without attention, the head 6 s: 10 layers and a head on three ranks are four each."""
    model = sample_model(num_layers=10)
    free = {"attention_s_per_pair": 0.0, "slice_s": 0.0}
    coefficients = sample_coefficients(
        embedding_s_per_token=0.0,
        head_s_per_token=6.0,
        optimizer_s_per_parameter=0.0,
        forward=PassCoefficients(linear_s_per_token=1.0, **free),
        backward=PassCoefficients(linear_s_per_token=2.0, **free),
    )
    layout = balanced(model, coefficients, [7, 1], pp=3)
    assert layout.stage_counts == (4, 4, 2)
    assert not layout.is_even
    assert layout.describe() == "pp=3 layers=4+4+2"


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_one_stage_a_rank_is_as_fast_as_brute_force(data) -> None:
    """With windows that differ between layers, any weight of the head, a reduction that may matter, and adapters."""
    num_layers = data.draw(st.integers(3, 9))
    pp, dp = data.draw(st.integers(2, min(4, num_layers))), data.draw(st.sampled_from([1, 2]))
    windows = data.draw(st.lists(st.sampled_from([0, 2, 5]), min_size=num_layers, max_size=num_layers))
    adapters = data.draw(st.sampled_from([0, 0, 30]))
    model = sample_model(num_layers=num_layers, sliding_windows=tuple(windows), adapter_parameters_per_layer=adapters)
    coefficients = sample_coefficients(
        head_s_per_token=data.draw(st.floats(0, 40)),
        embedding_s_per_token=data.draw(st.floats(0, 5)),
        optimizer_s_per_parameter=data.draw(st.sampled_from([0.0, 1e-3, 0.1])),
    )
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=5))
    result = balanced(model, coefficients, lengths, dp=dp, pp=pp)
    best_s = min(
        step_seconds(model, coefficients, split_layout(counts, dp=dp, pp=pp), lengths)
        for counts in splits(num_layers, pp)
    )
    assert step_seconds(model, coefficients, result, lengths) == pytest.approx(best_s, rel=1e-5)


def test_virtual_stages_of_unequal_layers_are_close_to_brute_force_and_never_worse_than_even() -> None:
    """Descents end in valleys: 0.3 % above the optimum in the mean, where the even split is 14 % above."""
    rng, gaps = np.random.default_rng(0), []
    for _ in range(60):
        num_layers = int(rng.integers(4, 11))
        model = sample_model(num_layers=num_layers, sliding_windows=tuple(rng.choice([0, 4], num_layers).tolist()))
        coefficients = sample_coefficients(head_s_per_token=float(rng.uniform(0, 40)))
        lengths = rng.integers(1, 40, int(rng.integers(1, 6))).tolist()
        result, *rest = (
            step_seconds(model, coefficients, layout, lengths)
            for layout in (
                balanced(model, coefficients, lengths, pp=2, virtual=2),
                even_layout(num_layers, pp=2, virtual=2),
                *(split_layout(counts, pp=2) for counts in splits(num_layers, 4)),
            )
        )
        assert result <= rest[0] * (1 + 1e-6)
        gaps.append(result / min(rest) - 1)
    assert np.mean(gaps) < 0.005
    assert max(gaps) < 0.08


@given(
    st.integers(2, 4),
    st.integers(1, 2),
    st.sampled_from([0.0, 10.0, 100.0]),
    st.integers(1, 30),
    st.sampled_from([0, 30]),
)
@settings(max_examples=60, deadline=None)
def test_no_rank_outgrows_memory_that_the_even_split_leaves(pp, virtual, head_s, kilobytes, adapters) -> None:
    """A split that moves layers to other ranks must not take the memory of their activations."""
    model = sample_model(num_layers=12, vocab_size=50, adapter_parameters_per_layer=adapters)
    coefficients = sample_coefficients(head_s_per_token=head_s)
    memory_bytes = kilobytes * 4096
    layout = balanced(model, coefficients, [30, 4], pp=pp, virtual=virtual, memory_bytes=memory_bytes)
    even = even_layout(12, pp=pp, virtual=virtual)
    assert static_bytes(model, layout).max() <= max(static_bytes(model, even).max(), STATIC_SHARE * memory_bytes)
    free = balanced(model, coefficients, [30, 4], pp=pp, virtual=virtual)
    if static_bytes(model, free).max() <= STATIC_SHARE * memory_bytes:
        assert layout == free
