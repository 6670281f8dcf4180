import itertools
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_samples import sample_coefficients, sample_model
from evenload.cost.layout_switch import ReceiveSeconds, _holds, _missing_bytes, _state_of, _weights_of, switch_seconds
from evenload.cost.memory import embedding_parameters, layer_parameters, optimizer_bytes_per_parameter
from evenload.errors import ConfigError
from evenload.types.cluster import LinkSpec
from evenload.types.layout import ParallelLayout, split_layout
from evenload.types.model import ModelSpec

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


def switch_bytes(model: ModelSpec, devices_per_node: int, old: ParallelLayout, new: ParallelLayout) -> int:
    """Bytes that all devices together receive."""
    needed = _holds(new, model)
    return round(
        sum(
            float((part * needed).sum())
            for units in (_weights_of(model, new), _state_of(model, new))
            for part in _missing_bytes(units, model, devices_per_node, old, new)
        )
    )


def test_two_stages_become_two_replicas_by_hand() -> None:
    """A layer has 592 weights (2 bytes, 12 of optimizer state), embedding and head 256, the final norm 8."""
    model = sample_model(num_layers=2)
    assert layer_parameters(model) == 592
    old, new = layout_of([1, 1], dp=1), layout_of([2], dp=2)
    # Device 0 lacks layer 1 and the head, and the first half of their state; device 1 layer 0 and the embedding.
    first = 2 * (592 + 264) + 12 * (592 + 264) / 2
    second = 2 * (592 + 256) + 12 * (592 + 256) / 2
    assert switch_bytes(model, 2, old, new) == first + second
    # The fuller side of the fuller device; both ways at once.
    assert switch_seconds(model, linked(2), old, new) == pytest.approx(first / 4.0)
    assert switch_seconds(model, linked(1), old, new) == pytest.approx(first / 1.0)


def test_optimizer_state_costs_what_the_step_does_not_hide() -> None:
    model = sample_model(num_layers=2)
    old, new = layout_of([1, 1], dp=1), layout_of([2], dp=2)
    weights_s, state_s = 2 * (592 + 264) / 4.0, 12 * (592 + 264) / 2 / 4.0
    for hidden_s in (0.0, 100.0, state_s, 2 * state_s):
        stands_still_s = weights_s + max(0.0, state_s - hidden_s)
        assert switch_seconds(model, linked(2), old, new, hidden_s) == pytest.approx(stands_still_s)


def test_unknown_link_and_other_groups_are_refused() -> None:
    old, new = layout_of([2, 1], dp=1), layout_of([1, 2], dp=1)
    with pytest.raises(ConfigError, match="know no link"):
        switch_seconds(sample_model(), sample_coefficients(), old, new)
    with pytest.raises(ConfigError, match="cp and tp may not"):
        switch_seconds(sample_model(), linked(), old, layout_of([3], dp=1, cp=2))


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
    """Brute force: every device, every unit, every shard in exact fractions."""
    num_layers, old, new, devices_per_node, tied = case
    model = sample_model(num_layers=num_layers, num_heads=2, num_kv_heads=2, tied_embeddings=tied)
    received, sent = ([{device: [Fraction(0), Fraction(0)] for device in range(layout.world_size)} for _ in range(2)]
                      for layout in (new, old))  # fmt: skip
    weights, states = range(2)
    for unit, size in enumerate(unit_sizes(model, new)):
        old_share, new_share = shares(old, unit, tied), shares(new, unit, tied)
        for device, (low, high) in new_share.items():
            holders = [other for other in old_share if other % old.tp == device % old.tp]
            near = [other for other in holders if other // devices_per_node == device // devices_per_node]
            if device not in old_share:
                received[weights][device][not near] += model.bytes_per_element * size
                for other in holders:
                    sent[weights][other][not near] += Fraction(model.bytes_per_element * size, len(holders))
            edges = {low, high, *(edge for other in holders for edge in old_share[other] if low < edge < high)}
            for start, stop in itertools.pairwise(sorted(edges)):
                having = [other for other in holders if old_share[other][0] <= start and stop <= old_share[other][1]]
                if device not in having:
                    near = [other for other in having if other // devices_per_node == device // devices_per_node]
                    moved = optimizer_bytes_per_parameter(model) * size * (stop - start)
                    received[states][device][not near] += moved
                    sent[states][having[0]][not near] += moved
    assert switch_bytes(model, devices_per_node, old, new) == pytest.approx(
        float(sum(sum(pair) for part in received for pair in part.values())), abs=1
    )

    def seconds(part: dict[int, list[Fraction]]) -> float:
        return max(max(float(near) / 4.0, float(far)) for near, far in part.values())

    receive = ReceiveSeconds(model, linked(devices_per_node), old, new)
    result = max(receive.of_stage(rank, *layers) for rank, layers in enumerate(new.stage_layers))
    assert result == pytest.approx(seconds(received[weights]))
    # Weights leave from all holders of a tensor-parallel place alike, so equal places send alike on average only; so
    # does a tied embedding from both ends.
    total = switch_seconds(model, linked(devices_per_node), old, new)
    assert total >= result - 1e-9
    if old.tp == 1 and not tied:
        assert total == pytest.approx(
            sum(max(seconds(received[part]), seconds(sent[part])) for part in (weights, states))
        )


def unit_sizes(model, layout: ParallelLayout) -> list[int]:
    embedding = embedding_parameters(model, layout.tp)
    head = 0 if model.tied_embeddings else embedding
    return [embedding, *layer_parameters(model, layout.tp).tolist() * model.num_layers, head + model.hidden_size]


def shares(layout: ParallelLayout, unit: int, tied: bool) -> dict[int, tuple[Fraction, Fraction]]:
    """Devices that hold a unit, and which part of its optimizer state; of a tied embedding those of both ends."""
    layer = min(max(unit - 1, 0), layout.num_layers - 1)
    ranks = [next(r for r, (first, last) in enumerate(layout.stage_layers) if first <= layer < last)]
    ranks += [layout.pp - 1] if tied and unit == 0 else []
    # Of a layout with stages of several devices dp = cp = 1.
    counts = [layout.dp * layout.cp * devices for devices in layout.devices]
    return {
        layout.global_rank(pp_rank=layout.stage_to_rank[rank] + turn, dp_rank=dp, cp_rank=cp, tp_rank=tp): (
            Fraction((dp + turn) * layout.cp + cp, counts[rank]),
            Fraction((dp + turn) * layout.cp + cp + 1, counts[rank]),
        )
        for rank in ranks
        for turn in range(layout.devices[rank])
        for dp in range(layout.dp)
        for cp in range(layout.cp)
        for tp in range(layout.tp)
    }
