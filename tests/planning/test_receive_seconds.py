import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_samples import sample_coefficients, sample_model
from evenload.cost.memory import embedding_parameters, layer_parameters
from evenload.errors import ConfigError
from evenload.planning.layouts.moves import ReceiveSeconds, SwitchPrices
from evenload.types.cluster import LinkSpec
from evenload.types.layout import ParallelLayout, split_layout

FAST, SLOW = LinkSpec(bandwidth_bytes_per_s=4.0, latency_s=0.0), LinkSpec(bandwidth_bytes_per_s=1.0, latency_s=0.0)


def linked(devices_per_node: int = 2, **changes):
    return sample_coefficients(intra_node=FAST, inter_node=SLOW, devices_per_node=devices_per_node, **changes)


def layout_of(counts: list[int], dp: int, cp: int = 1, tp: int = 1) -> ParallelLayout:
    edges = [sum(counts[:stage]) for stage in range(len(counts) + 1)]
    return ParallelLayout(
        dp=dp,
        cp=cp,
        pp=len(counts),
        tp=tp,
        stage_layers=tuple(itertools.pairwise(edges)),
        stage_to_rank=tuple(range(len(counts))),
    )


def test_two_stages_become_two_replicas_by_hand() -> None:
    """A layer has 592 weights (2 bytes), embedding and head 256, the final norm 8."""
    model = sample_model(num_layers=2)
    assert layer_parameters(model) == 592
    old, new = layout_of([1, 1], dp=1), layout_of([2], dp=2)
    # Device 0 lacks layer 1 and the head, device 1 layer 0 and the embedding.
    first = 2 * (592 + 264)
    assert ReceiveSeconds(model, linked(2), old, new).of_stage(0, 0, 2) == first / 4.0
    assert ReceiveSeconds(model, linked(1), old, new).of_stage(0, 0, 2) == first / 1.0


def test_unknown_link_and_other_groups_are_refused() -> None:
    old, new = layout_of([2, 1], dp=1), layout_of([1, 2], dp=1)
    with pytest.raises(ConfigError, match="know no link"):
        ReceiveSeconds(sample_model(), sample_coefficients(), old, new)
    with pytest.raises(ConfigError, match="cp and tp may not"):
        ReceiveSeconds(sample_model(), linked(), old, layout_of([3], dp=1, cp=2))


@st.composite
def layout_pairs(draw):
    num_layers, cp, tp = draw(st.integers(1, 6)), draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2]))

    def one() -> ParallelLayout:
        cuts = draw(st.sets(st.integers(1, num_layers - 1), max_size=3)) if num_layers > 1 else set()
        edges = [0, *sorted(cuts), num_layers]
        counts = [b - a for a, b in itertools.pairwise(edges)]
        devices = draw(st.lists(st.integers(1, 3), min_size=len(counts), max_size=len(counts)))
        if cp * tp == 1 and len(set(devices)) > 1 and draw(st.booleans()):
            return split_layout(counts, pp=len(counts), devices=devices)
        return layout_of(counts, draw(st.integers(1, 4)), cp, tp)

    return num_layers, one(), one(), draw(st.sampled_from([2, 4, 8])), draw(st.booleans())


@given(layout_pairs())
def test_equals_a_count_device_by_device(case) -> None:
    """Brute force: every device and every unit; never above what all moves of the switch take."""
    num_layers, old, new, devices_per_node, tied = case
    model = sample_model(num_layers=num_layers, num_heads=2, num_kv_heads=2, tied_embeddings=tied)
    received = {device: [0, 0] for device in range(new.world_size)}
    for unit, size in enumerate(unit_sizes(model, new)):
        had = devices_of(old, unit, tied)
        for device in devices_of(new, unit, tied) - had:
            near = any(other // devices_per_node == device // devices_per_node for other in had)
            received[device][not near] += model.bytes_per_element * size
    receive = ReceiveSeconds(model, linked(devices_per_node), old, new)
    result = max(receive.of_stage(rank, *layers) for rank, layers in enumerate(new.stage_layers))
    assert result == pytest.approx(max(max(near / 4.0, far) for near, far in received.values()))
    costs = linked(devices_per_node)
    assert SwitchPrices(model, old, costs).seconds(costs, old, new, 0.0) >= result - 1e-9


def unit_sizes(model, layout: ParallelLayout) -> list[int]:
    embedding = embedding_parameters(model, layout.tp)
    head = 0 if model.tied_embeddings else embedding
    return [embedding, *layer_parameters(model, layout.tp).tolist() * model.num_layers, head + model.hidden_size]


def devices_of(layout: ParallelLayout, unit: int, tied: bool) -> set[int]:
    """Devices that hold a unit; of a tied embedding those of both ends."""
    layer = min(max(unit - 1, 0), layout.num_layers - 1)
    ranks = [next(r for r, (first, last) in enumerate(layout.stage_layers) if first <= layer < last)]
    ranks += [layout.pp - 1] if tied and unit == 0 else []
    return {
        layout.global_rank(pp_rank=layout.stage_to_rank[rank] + turn, dp_rank=dp, cp_rank=cp, tp_rank=tp)
        for rank in ranks
        for turn in range(layout.devices[rank])
        for dp in range(layout.dp)
        for cp in range(layout.cp)
        for tp in range(layout.tp)
    }
