"""Tensor parallelism under split backwards, and the ring: what is charged, by hand."""

import dataclasses

import numpy as np
import pytest

from cost_samples import sample_coefficients, sample_model
from evenload.cost.memory import ReplicaPacks
from evenload.cost.pack_cost import PackCosts
from evenload.cost.pipeline_tasks import pipeline_tasks
from evenload.types.cluster import LinkSpec
from evenload.types.columns import SliceColumns
from evenload.types.layout import even_layout

LINK = LinkSpec(bandwidth_bytes_per_s=100.0, latency_s=0.25)
LINKS = {"intra_node": LINK, "inter_node": LINK, "devices_per_node": 64}


def split_of(coefficients, *, tp: int, **model):
    """(I + W, B) of a pack of 4 tokens on the first of 3 stages."""
    packs = SliceColumns.from_ranges([[(0, 0, 4)]])
    costs = PackCosts(sample_model(num_kv_heads=2, **model), coefficients, even_layout(3, pp=3, tp=tp))
    tasks = pipeline_tasks(costs, ReplicaPacks(packs, packs, np.array([4])), split=True)
    assert tasks.split is not None
    return tasks.split.input_s[0, 0] + tasks.split.weight_s[0, 0], tasks.backward_s[0, 0]


def test_weight_gradients_gather_four_times_again() -> None:
    """4 rings of 4 tokens · 8 hidden · 2 bytes, half of it over the link; the exposed share of them."""
    rings = 4 * (4 * 16 * 0.5 / 100.0 + 0.25)
    for share in (0.5, 1.0):
        parts_s, whole_s = split_of(sample_coefficients(**LINKS, weight_gather_exposed_share=share), tp=2)
        assert parts_s - whole_s == pytest.approx(share * rings)
    # A calibrated run has the other transfers in its layers' seconds, but never these.
    timed = sample_coefficients(**LINKS, tensor_exposed_share=0.0, weight_gather_exposed_share=1.0)
    parts_s, whole_s = split_of(timed, tp=2)
    assert parts_s - whole_s == pytest.approx(rings)


def ring_and_gathered(packs, direction: str, size: int):
    """Seconds of a layer's transfers, where transfers take a second a byte and a million a hop."""
    link = LinkSpec(bandwidth_bytes_per_s=1.0, latency_s=1e6)
    packs = dataclasses.replace(packs, cp=np.full(packs.num_slices, size))
    found = []
    for exchange in ("ring", "all_gather"):
        coefficients = sample_coefficients(intra_node=link, devices_per_node=8, context_exchange=exchange)
        costs = PackCosts(sample_model(num_layers=1), coefficients, even_layout(1, cp=size))
        found.append(costs.context_seconds(packs, direction)[0][:, 0].tolist())
    return found


def test_a_ring_carries_the_prefix_of_every_slice() -> None:
    """K and V of a token are 16 bytes, their fp32 gradients 32. Three quarters of a slice's whole prefix travel to the
    next rank in 3 hops. Gathered keys of a document that is cut do not travel again in backward."""
    packs = SliceColumns.from_ranges([[(0, 0, 64)], [(0, 64, 128)], [(0, 64, 128), (1, 0, 32)]])
    ring, gathered = ring_and_gathered(packs, "forward", 4)
    assert ring == pytest.approx([3e6 + 0.75 * 16 * n for n in (64, 128, 160)])
    assert gathered == pytest.approx([3e6 + 0.75 * 16 * n for n in (64, 64, 96)])
    ring, gathered = ring_and_gathered(packs, "backward", 4)
    assert ring == pytest.approx([6e6 + 0.75 * 48 * n for n in (64, 128, 160)])
    assert gathered == pytest.approx([3e6 + 0.75 * 32 * 64, 3e6 + 0.75 * 32 * 64, 6e6 + 0.75 * (32 * 64 + 48 * 32)])
