import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_samples import BACKWARD, FORWARD, sample_coefficients, sample_model
from evenload.cost.pack_cost import PackCosts
from evenload.cost.pack_split import PackSplit, split_pack_seconds
from evenload.types.cluster import LinkSpec
from evenload.types.columns import whole_document_columns
from evenload.types.layout import even_layout

LINK = LinkSpec(bandwidth_bytes_per_s=200.0, latency_s=0.1)
CAUSES = tuple(PackSplit.__annotations__)


def costs_of(layout, **changes) -> PackCosts:
    links = {"intra_node": LINK, "inter_node": LINK, "devices_per_node": 64, "host_link": LINK}
    return PackCosts(sample_model(), sample_coefficients(**(links | changes)), layout)


def test_causes_of_a_forward_pack_by_hand():
    """Documents of 3 and 9 tokens padded to 9, one stage of three layers, tiles of 8 rows.

    useful   12 tokens (3·1.0 + 0.5 embedding), 6 + 45 pairs at 3·0.1
    padding  6 tokens, 39 pairs
    kernels  2 slices at 3·0.01, a pack at 3·5, and 2 slices lack 7 rows to 16, each of which sees 9 keys
    """
    columns = whole_document_columns([[0, 1]], np.array([3, 9]), padded=True)
    split = split_pack_seconds(costs_of(even_layout(3), attention_tile=8), columns, "forward")
    assert split.useful_s.item() == pytest.approx(12 * 3.5 + 51 * 0.3)
    assert split.padding_s.item() == pytest.approx(6 * 3.5 + 39 * 0.3)
    assert split.kernels_s.item() == pytest.approx(0.06 + 15 + 2 * 7 * 9 * 0.3)
    for name in CAUSES[3:]:
        assert getattr(split, name).item() == 0


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=6),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2]),
    st.integers(1, 3),
    st.sampled_from(["forward", "backward"]),
    st.data(),
)
def test_causes_add_up_and_none_is_negative(lengths, cp, tp, pp, direction, data):
    """A negative cause would mean that something of the model is counted twice."""
    num_tokens = np.array(lengths)
    padded = data.draw(st.booleans())
    groups = [[doc] for doc in range(len(lengths))] if data.draw(st.booleans()) else [list(range(len(lengths)))]
    columns = whole_document_columns(groups, num_tokens, cp, padded=padded)
    policy = np.array(data.draw(st.lists(st.integers(0, 2), min_size=len(lengths), max_size=len(lengths))), np.int8)
    forward, backward = (
        msgspec.structs.replace(one, prefix_s_per_token=0.02, host_slice_s=5.0, host_pack_s=10.0)
        for one in (FORWARD, BACKWARD)
    )
    passes = {"forward": forward, "backward": backward}
    costs = costs_of(even_layout(3, cp=cp, tp=tp, pp=pp), attention_tile=4, **passes)
    split = split_pack_seconds(costs, columns, direction, policy)
    total_s = sum(getattr(split, name) for name in CAUSES)
    np.testing.assert_allclose(total_s, costs.pack_seconds(columns, direction, policy), rtol=1e-12)
    for name in CAUSES:
        assert (getattr(split, name) >= -1e-9 * total_s).all(), name


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=6), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]))
def test_useful_work_of_all_ranks_is_the_lower_bound(lengths, cp, tp):
    """Whatever the cuts, padding and sharing: `fraction_of_bound` and the split speak of the same useful work."""
    num_tokens = np.array(lengths)
    layout = even_layout(3, cp=cp, tp=tp, pp=3)
    costs = costs_of(layout, attention_tile=4)
    columns = whole_document_columns([list(range(len(lengths)))], num_tokens, cp, padded=True)
    useful_s = sum(split_pack_seconds(costs, columns, way).useful_s.sum() for way in ("forward", "backward"))
    assert useful_s / layout.pp == pytest.approx(costs.lower_bound_seconds(num_tokens), rel=1e-12)
