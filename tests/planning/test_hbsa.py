import itertools

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cost_samples import reduction_seconds, sample_coefficients, sample_model
from evenload.cost.memory import static_bytes
from evenload.cost.pack_cost import PackCosts
from evenload.planning.activation_policy import policies_in_order
from evenload.planning.layouts.mapping_search import (
    BatchCosts,
    BatchLengths,
    Mapping,
    MappingCosts,
    layer_bounds,
    layer_costs,
    priced_mapping,
    search_mappings,
)
from evenload.planning.layouts.moves import ReceiveSeconds
from evenload.types.cluster import LinkSpec
from evenload.types.columns import whole_document_columns
from evenload.types.layout import ParallelLayout, even_layout
from reference.prices import p2p_seconds

LINK = LinkSpec(bandwidth_bytes_per_s=1e4, latency_s=0.1)
LAYERS = 7
GAP = 0.05
"""Most by which a mapping that the search leaves out may be better; the mean is asserted to be far lower."""


class Case:
    """A batch, a memory limit, and a layout to come from."""

    def __init__(
        self,
        lengths: list[int],
        groups: int,
        cap_bytes: int | None = None,
        current: ParallelLayout | None = None,
        num_layers: int = LAYERS,
        **changes,
    ) -> None:
        self.model = sample_model(num_layers=num_layers, **changes)
        self.coefficients = sample_coefficients(
            intra_node=LINK,
            inter_node=LINK,
            devices_per_node=4,
            host_link=LinkSpec(bandwidth_bytes_per_s=1e3, latency_s=0),
        )
        self.groups, self.cap_bytes, self.current = groups, cap_bytes, current
        num_tokens = np.array(lengths, np.int64)
        self.policies = policies_in_order(num_tokens, "choose", can_offload=True)
        self.batches = [self.batch_costs(num_tokens, policy) for policy in self.policies]

    def batch_costs(self, num_tokens: np.ndarray, policy: np.ndarray | None) -> BatchCosts:
        return BatchCosts(BatchLengths(layer_costs(self.model, self.coefficients), num_tokens), policy)

    def prices_of(self, depth: int, policy: int, counts: tuple[int, ...] = (1, 2, 4)) -> list[MappingCosts]:
        return [
            MappingCosts(
                self.batches[policy],
                self.coefficients,
                depth=depth,
                dp=self.groups // depth,
                micro_batches=count * depth,
                cap_bytes=self.cap_bytes,
            )
            for count in counts
        ]

    def receive_of(self, depth: int) -> ReceiveSeconds | None:
        if self.current is None:
            return None
        layout = even_layout(self.model.num_layers, dp=self.groups // depth, pp=depth)
        return ReceiveSeconds(self.model, self.coefficients, self.current, layout)

    def search(self, **options):
        depths = range(1, min(self.model.num_layers, self.groups) + 1)
        return search_mappings(depths, len(self.policies), self.prices_of, self.receive_of, **options)

    def all_mappings(self) -> list[Mapping]:
        """Every split of the layers at every depth, policy and number of micro-batches."""
        layers, everything = self.model.num_layers, []
        for depth in range(1, min(layers, self.groups) + 1):
            receive = self.receive_of(depth)
            for policy in range(len(self.policies)):
                prices = self.prices_of(depth, policy)
                everything += [
                    priced_mapping(price, (0, *cuts, layers), policy, receive)
                    for cuts in itertools.combinations(range(1, layers), depth - 1)
                    for price in prices
                ]
        return everything


def cost_s(mapping: Mapping) -> float:
    return mapping.step_s + mapping.switch_s


LENGTHS = st.lists(st.one_of(st.integers(1, 40), st.integers(100, 400)), min_size=1, max_size=16)


@settings(max_examples=25, deadline=None)
@given(LENGTHS, st.integers(1, 6), st.sampled_from([None, 60_000, 200_000]), st.booleans(), st.booleans())
@example([100, 100, 215], 4, 200_000, False, False)  # only 6 + 1 layers fit in two stages
def test_search_is_near_the_exhaustive_optimum(lengths, groups, cap_bytes, comes_from, tied) -> None:
    """Within `GAP` of the best of all mappings, and a mapping that fits wherever any does."""
    current = even_layout(LAYERS, dp=groups) if comes_from else None
    case = Case(lengths, groups, cap_bytes, current, tied_embeddings=tied)
    result = case.search()
    everything = case.all_mappings()
    fitting = [one for one in everything if not one.excess_bytes]
    best = result.mappings[0]
    assert result.num_priced < len(everything) or groups == 1
    if fitting:
        assert not best.excess_bytes
        assert cost_s(best) <= min(map(cost_s, fitting)) * (1 + GAP)


def test_gap_and_pruning_on_a_seeded_set() -> None:
    """The figures docs/planner.md states."""
    generator = np.random.default_rng(0)
    gaps, shares = [], []
    for _ in range(36):
        lengths = generator.lognormal(3.5, 1.2, 12).astype(int) + 1
        groups = int(generator.integers(2, 7))
        cap_bytes = [None, 200_000, 300_000][generator.integers(3)]
        case = Case(lengths.tolist(), groups, cap_bytes, even_layout(LAYERS, pp=groups))
        result, everything = case.search(), case.all_mappings()
        fitting = [cost_s(one) for one in everything if not one.excess_bytes]
        if fitting:
            gaps.append(cost_s(result.mappings[0]) / min(fitting) - 1)
            shares.append(result.num_priced / len(everything))
    assert len(gaps) > 25
    assert max(gaps) < 0.03
    assert np.mean(gaps) < 0.002
    assert np.mean(shares) < 0.1


def test_least_depth_only_is_the_published_start() -> None:
    roomy, tight = Case([40] * 12, 6), Case([40] * 12, 6, 60_000)
    assert [one.depth for one in roomy.search(least_depth_only=True).mappings] == [1]
    depth = min(one.depth for one in tight.search().mappings if not one.excess_bytes)
    assert depth > 1
    assert tight.search(least_depth_only=True).mappings[0].depth == depth


def test_last_stage_gets_fewer_layers_for_the_head() -> None:
    """A head as dear as two layers: an even split would make the last stage the slowest by far."""
    case = Case([30] * 24, 2, vocab_size=32, num_layers=8)
    linear_s, pair_s = 1.0 + 2.0, 0.1 + 0.25
    head_s = 2 * (linear_s + pair_s * 31 / 2)
    case.coefficients = sample_coefficients(head_s_per_token=head_s)
    case.batches = [case.batch_costs(np.full(24, 30, np.int64), None)] * len(case.policies)
    two = next(one for one in case.search().mappings if one.depth == 2)
    assert two.edges == (0, 5, 8)


def test_bounds_are_those_of_the_paper_without_ends() -> None:
    bounds = layer_bounds(40, 6, embedding_layers=0, head_layers=0)
    assert (set(bounds.low), set(bounds.high)) == ({6}, {10})
    ends = layer_bounds(40, 8, embedding_layers=1, head_layers=2)
    assert (ends.low[0], ends.low[1], ends.low[-1]) == (4, 5, 3)
    assert ends.high[0] == 6


@pytest.mark.parametrize("adapters", [0, 24])
def test_equal_micro_batches_take_equation_1(adapters) -> None:
    """sum t + (n - 1) max t, as printed it would count a single stage n + 1 times; then what is trained is reduced."""
    case = Case([10] * 8, 2, adapter_parameters_per_layer=adapters)
    for depth in (1, 2):
        (price,) = case.prices_of(depth, 0, counts=(4 // (2 // depth) // depth or 1,))
        n = price.micro_batches
        layout = even_layout(LAYERS, dp=2 // depth, pp=depth)
        costs = PackCosts(case.model, case.coefficients, layout)
        share = 8 // (layout.dp * n)
        pack = whole_document_columns([list(range(share))], np.full(share, 10, np.int64))
        stage_s = (costs.pack_seconds(pack, "forward") + costs.pack_seconds(pack, "backward"))[0]
        hops_s = 2 * (depth - 1) * float(p2p_seconds(costs, pack)[0])
        after_s = reduction_seconds(costs) + costs.optimizer_seconds()
        expected_s = stage_s.sum() + (n - 1) * stage_s.max() + hops_s + after_s
        assert price.step_seconds(price.even_edges) == pytest.approx(expected_s)


@pytest.mark.parametrize("adapters", [0, 24])
def test_memory_of_a_stage_starts_with_weights_and_optimizer(adapters) -> None:
    """Of adapters only, where the model's own weights are frozen."""
    case = Case([10] * 8, 4, 10**9, adapter_parameters_per_layer=adapters)
    short = Case([1] * 8, 4, 10**9, adapter_parameters_per_layer=adapters)
    for depth in (1, 2, 4):
        (price,) = case.prices_of(depth, 0, counts=(1,))
        layout = even_layout(LAYERS, dp=4 // depth, pp=depth)
        held = static_bytes(case.model, layout)
        for stage, layers in enumerate(layout.stage_layers):
            assert price.stage_bytes(stage, *layers) > held[stage] - 12
        assert price.total_bytes() < 10 * held.sum()
        # With hardly any activations there is hardly anything else.
        assert short.prices_of(depth, 0, counts=(1,))[0].total_bytes() < 2 * held.sum()
