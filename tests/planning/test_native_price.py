"""The core prices packs exactly as numpy does: the same bits in every column."""

import dataclasses
import itertools

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_samples import BACKWARD, FORWARD, mixed_model, recurrent_model, sample_coefficients, sample_model
from evenload.cost.layer_counts import OFFLOAD
from evenload.cost.memory import ReplicaPacks
from evenload.cost.pack_cost import PackCosts
from evenload.cost.pack_pricing import pipeline_tasks
from evenload.errors import ConfigError
from evenload.types.cluster import LinkSpec
from evenload.types.columns import SliceColumns
from evenload.types.layout import even_layout
from evenload.types.model import ModelSpec
from evenload.types.pipeline import PipelineTasks
from reference import prices

LINKS = {
    "intra_node": LinkSpec(bandwidth_bytes_per_s=700.0, latency_s=0.125),
    "inter_node": LinkSpec(bandwidth_bytes_per_s=90.0, latency_s=0.75),
    "host_link": LinkSpec(bandwidth_bytes_per_s=50.0, latency_s=0.3),
    "devices_per_node": 4,
    "attention_tile": 8,
}


def sliced(draw: st.DrawFn, num_tokens: list[int], pads: bool, ranks: bool, *, backward: bool) -> SliceColumns:
    """Documents cut anywhere, pieces of a document in order (backward: last first), dealt into packs."""
    pieces = []
    for document, tokens in enumerate(num_tokens):
        inner = [] if pads else draw(st.lists(st.integers(1, max(1, tokens - 1)), max_size=3))
        edges = sorted({0, tokens, *(edge for edge in inner if edge < tokens)})
        mine = list(zip([document] * len(edges), edges[:-1], edges[1:], strict=False))
        pieces += mine[::-1] if backward else mine
    closes = [draw(st.booleans()) for _ in pieces]
    closes[-1] = True
    offset = np.array([0, *(i + 1 for i, close in enumerate(closes) if close)], np.int64)
    flat = np.array(pieces, np.int64).reshape(-1, 3)
    longest = [int(flat[lo:hi, 2].max()) for lo, hi in itertools.pairwise(offset)]
    pad_to = np.array([tokens if pads and draw(st.booleans()) else 0 for tokens in longest], np.int64)
    cp = np.ones(len(flat), np.int64)
    if ranks:
        of_document = np.array([draw(st.sampled_from([1, 2, 4, 8])) for _ in num_tokens], np.int64)
        cp = of_document[flat[:, 0]]
    return SliceColumns(flat[:, 0].astype(np.int32), flat[:, 1].copy(), flat[:, 2].copy(), offset, pad_to, cp)


@st.composite
def priced_inputs(draw: st.DrawFn) -> tuple[PackCosts, SliceColumns, SliceColumns, np.ndarray, np.ndarray | None]:
    """A model, a layout and packs of its documents."""
    num_tokens = draw(st.lists(st.integers(1, 300), min_size=1, max_size=7))
    windows = draw(st.sampled_from([(), (0, 16, 16), (16, 16, 16), (0, 0, 40)]))
    causal = bool(windows) or draw(st.booleans())
    model: ModelSpec = sample_model(
        sliding_windows=windows,
        causal=causal,
        num_heads=4,
        num_kv_heads=draw(st.sampled_from([1, 4])),
        adapter_parameters_per_layer=draw(st.sampled_from([0, 0, 40])),
    )
    has_states = False
    if causal and draw(st.integers(0, 3)) == 0:
        has_states = draw(st.booleans())
        model = recurrent_model() if has_states else mixed_model(mixer="")
    pads = not causal or draw(st.booleans())
    shares = causal and not has_states and draw(st.booleans())
    layout = even_layout(
        model.num_layers,
        dp=2,
        pp=draw(st.integers(1, 3)),
        cp=draw(st.sampled_from([1, 2])) if causal and not has_states else 1,
        tp=draw(st.sampled_from([1, 2])),
    )
    exchange = draw(st.sampled_from(["all_gather", "ring"]))
    links = {**LINKS, "nics_per_node": draw(st.sampled_from([None, 1, 4, 8]))}
    # Of a host that is never late, one that is late for small packs, and one for all.
    host = {"host_slice_s": draw(st.sampled_from([0.0, 7.0])), "host_pack_s": draw(st.sampled_from([0.0, 50.0, 1e5]))}
    passes = {
        name: msgspec.structs.replace(one, **host) for name, one in (("forward", FORWARD), ("backward", BACKWARD))
    }
    coefficients = sample_coefficients(
        **links,
        **passes,
        context_exchange=exchange,
        context_hidden_share=draw(st.sampled_from([0.0, 0.8])),
        weight_share=draw(st.sampled_from([None, 0.0, 0.35, 0.5, 1.0])),
    )
    costs = PackCosts(model, coefficients, layout)
    forward, backward = (sliced(draw, num_tokens, pads, shares, backward=last_first) for last_first in (False, True))
    if not shares:
        forward, backward = (
            dataclasses.replace(packs, cp=np.full(packs.num_slices, layout.cp)) for packs in (forward, backward)
        )
    if pads:
        backward = forward
    codes = draw(st.lists(st.integers(0, 2), min_size=len(num_tokens), max_size=len(num_tokens)))
    policy = draw(st.sampled_from([None, np.array(codes, np.int8)]))
    return costs, ReplicaPacks(forward, backward, np.array(num_tokens, np.int64), policy)


def assert_same(one: PipelineTasks, other: PipelineTasks) -> None:
    for of_one, of_other in ((one, other), (one.held, other.held), (one.split, other.split)):
        for field in dataclasses.fields(of_one):
            if field.name in ("held", "split"):
                continue
            first, second = getattr(of_one, field.name), getattr(of_other, field.name)
            np.testing.assert_array_equal(first, second, field.name)
            assert first.dtype == second.dtype, field.name


@settings(deadline=None)
@given(priced_inputs())
def test_prices_of_the_core_equal_the_reference(inputs: tuple) -> None:
    """Slices, padding, windows, tiles, policies, shared documents, rings, adapters, tp, cp, pp, split backwards."""
    assert_same(pipeline_tasks(*inputs, split=True), prices.pipeline_tasks(*inputs, split=True))


@pytest.mark.parametrize(
    ("model", "dp", "starts", "cp", "policy", "match"),
    [
        ({"causal": False}, 1, (0, 4), 1, None, "bidirectional"),  # a token sees the whole document
        ({}, 1, (0,), 1, [OFFLOAD], "host_link"),
        ({"num_heads": 4, "num_kv_heads": 4}, 2, (0,), 2, None, "no link"),
    ],
)
def test_what_has_no_price_is_refused_by_both(model, dp, starts, cp, policy, match) -> None:
    """Else the core would divide by a bandwidth of zero, or keys and values would travel for nothing."""
    costs = PackCosts(sample_model(**model), sample_coefficients(), even_layout(3, dp=dp))
    count = len(starts)
    packs = SliceColumns(
        np.zeros(count, np.int32),
        np.array(starts),
        np.array([*starts[1:], 8]),
        np.arange(count + 1),
        np.zeros(count, np.int64),
        np.full(count, cp, np.int64),
    )
    codes = None if policy is None else np.array(policy, np.int8)
    for price in (pipeline_tasks, prices.pipeline_tasks):
        with pytest.raises(ConfigError, match=match):
            price(costs, ReplicaPacks(packs, packs, np.array([8]), codes))


def test_packs_of_other_documents_are_refused() -> None:
    """The core reads memory by these numbers."""
    costs = PackCosts(sample_model(), sample_coefficients(), even_layout(3))
    packs = SliceColumns.from_ranges([[(0, 0, 8)]])
    with pytest.raises(ValueError, match="names document"):
        pipeline_tasks(costs, ReplicaPacks(packs, packs, np.empty(0, np.int64)))
    rest = dataclasses.replace(packs, start=np.array([4]))
    with pytest.raises(ValueError, match="no backward slice from token 0"):
        pipeline_tasks(costs, ReplicaPacks(packs, rest, np.array([8])))
