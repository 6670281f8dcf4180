"""The first transfer of every group, which NCCL needs before a step; here over gloo."""

import pytest
import torch

from evenload.runtime.comm.mesh import ChannelMode, create_meshes, warm_up
from evenload.types.layout import even_layout
from gloo_pool import TIMEOUT_S


def transfers(sizes: dict, channels: ChannelMode = "directed") -> int:
    mesh = create_meshes([even_layout(8, **sizes)], torch.device("cpu"), timeout_s=TIMEOUT_S, channels=channels).start
    return warm_up(mesh)


@pytest.mark.parametrize(
    ("sizes", "counts"),
    [
        # 3 neighbouring pairs, two channels each; the ends also hold a tied embedding together.
        ({"pp": 4}, [3, 4, 4, 3]),
        # Two virtual stages a rank: three hops between the same two ranks, in both directions.
        ({"pp": 2, "virtual": 2}, [7, 7]),
        # Replicas, both context groups, and the neighbour: data + tie + 2 contexts + 2 channels.
        ({"pp": 2, "dp": 2}, None),
        ({"dp": 2, "cp": 2}, None),
        ({"dp": 2, "tp": 2}, None),
    ],
)
def test_every_group_is_used_once_and_nobody_waits_for_ever(gloo_pool, sizes, counts):
    """Neighbours that use their channels in different orders would wait for each other."""
    layout = even_layout(8, **sizes)
    found = gloo_pool.run(layout.world_size, transfers, sizes)
    assert all(count >= 1 for count in found)
    if counts is not None:
        assert found == counts


@pytest.mark.parametrize(
    ("sizes", "counts"),
    [
        # One group a pair of neighbours, and that of the tied embedding.
        ({"pp": 4}, [2, 2, 2, 2]),
        # Last and first rank are neighbours, too.
        ({"pp": 3, "virtual": 2}, [3, 2, 3]),
        ({"pp": 2, "virtual": 2}, [2, 2]),
    ],
)
def test_ranks_that_share_one_queue_use_its_group_once(gloo_pool, sizes, counts):
    """All channels between two ranks, in both directions and of all their stages, are one group."""
    assert gloo_pool.run(even_layout(8, **sizes).world_size, transfers, sizes, "fifo") == counts
