"""Latency and bandwidth from the seconds of several sizes, and which transfers a rank takes part in."""

import msgspec
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from dist_training import COSTS
from evenload.calibrate.links import (
    GRID_BYTES,
    QUICK_BYTES,
    link_from,
    links_of_layouts,
    median_link,
    quick_links,
    transfers_of,
)
from evenload.runtime.comm.mesh import create_meshes
from evenload.types.cluster import LinkSpec
from evenload.types.layout import even_layout
from gloo_pool import TIMEOUT_S


@given(
    bandwidth=st.floats(1e7, 1e12), latency_s=st.floats(1e-7, 1e-2), sizes=st.sampled_from([QUICK_BYTES, GRID_BYTES])
)
def test_a_line_gives_its_latency_and_bandwidth_back(bandwidth, latency_s, sizes):
    """As long as the largest size says something about bandwidth."""
    assume(sizes[-1] / bandwidth > 0.02 * latency_s)
    link = link_from(sizes, [latency_s + size / bandwidth for size in sizes])
    assert link.latency_s == pytest.approx(latency_s, rel=1e-3)
    assert link.bandwidth_bytes_per_s == pytest.approx(bandwidth, rel=1e-3)


def test_a_link_that_nobody_used_is_not_known():
    fast, slow = (LinkSpec(bandwidth_bytes_per_s=rate, latency_s=0.0) for rate in (4.0, 2.0))
    assert median_link([{}, {}], "pipeline") is None
    assert median_link([{"context": fast}, {}, {"tensor": slow}], "context", "tensor") == LinkSpec(
        bandwidth_bytes_per_s=3.0, latency_s=0.0
    )


def _kinds_of_a_rank(sizes):
    mesh = create_meshes([even_layout(4, **sizes)], torch.device("cpu"), TIMEOUT_S).start
    works, links = list(transfers_of(mesh)), quick_links(mesh)
    assert links.keys() == {work.kind for work in works}
    assert all(link.bandwidth_bytes_per_s > 1e6 and link.latency_s >= 0 for link in links.values())
    return [(work.kind, work.ranks, work.hops) for work in works]


def _completed(*sizes):
    layouts = [even_layout(4, **one) for one in sizes]
    costs = msgspec.structs.replace(COSTS, p2p_bandwidth_bytes_per_s=None, reduce_bandwidth_bytes_per_s=None)
    costs = links_of_layouts(costs, create_meshes(layouts, torch.device("cpu"), TIMEOUT_S))
    return [costs.link_or_none("p2p"), costs.link_or_none("reduce"), costs.gather_link]


def test_links_that_only_other_layouts_use_are_measured_there(gloo_pool):
    """By all ranks alike; one that is idle there measures nothing."""
    for sizes in ([{"pp": 3}, {"dp": 3}], [{"dp": 3}, {"pp": 2}, {"pp": 3}]):
        of_ranks = gloo_pool.run(3, _completed, *sizes)
        assert None not in of_ranks[0]
        assert of_ranks == of_ranks[:1] * 3
    assert gloo_pool.run(2, _completed, {"pp": 2})[0][1:] == [None, None]


def test_every_link_of_a_layout_is_timed(gloo_pool):
    """By hand: groups of two replicas share documents, and so do all four ranks; a hop is one transfer to the next."""
    assert gloo_pool.run(2, _kinds_of_a_rank, {"pp": 2}) == [[("pipeline", 2, 2)]] * 2
    two = [("pipeline", 2, 2), ("reduction", 2, 1), ("gather", 2, 1), ("context", 2, 2)]
    assert gloo_pool.run(2, _kinds_of_a_rank, {"dp": 2}) == [two] * 2
    assert gloo_pool.run(2, _kinds_of_a_rank, {"tp": 2}) == [[("tensor", 2, 1)]] * 2
    # Reductions are not over one hop to a neighbour, which is several times faster than gloo's rings.
    assert all(("reduction", 3, 2) in kinds for kinds in gloo_pool.run(3, _kinds_of_a_rank, {"dp": 3}))
    # dp 2 x cp 2: all four may share a document, the largest group.
    four = [("reduction", 4, 3), ("gather", 4, 3), ("context", 4, 6)]
    result = gloo_pool.run(4, _kinds_of_a_rank, {"dp": 2, "cp": 2})
    assert [[one for one in kinds if one[0] != "pipeline"] for kinds in result] == [four] * 4
