"""Process groups of a run: as many as planned, each used once before the first step, and what ranks must agree on."""

import pytest
import torch
import torch.distributed as dist

from evenload.errors import ConfigError
from evenload.planning.layouts.layout_candidates import num_groups
from evenload.runtime.comm.mesh import ChannelMode, create_meshes, most_of_ranks, warm_up
from evenload.runtime.stages.live_stages import require_same_revision
from evenload.types.layout import ParallelLayout, even_layout
from gloo_pool import TIMEOUT_S


def transfers(sizes: dict, channels: ChannelMode = "directed") -> int:
    return warm_up(create_meshes([even_layout(8, **sizes)], torch.device("cpu"), TIMEOUT_S, channels=channels))


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
    result = gloo_pool.run(layout.world_size, transfers, sizes)
    assert all(count >= 1 for count in result)
    if counts is not None:
        assert result == counts


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


def groups_made(layouts: tuple[ParallelLayout, ...]) -> int:
    """Of a run that may take these layouts."""
    return create_meshes(layouts, torch.device("cpu"), TIMEOUT_S).num_groups


def test_groups_of_layouts_are_as_many_as_counted(gloo_pool):
    """What every run makes beside those of its layouts is the same for all sets of several layouts."""
    first = (even_layout(8, dp=4), even_layout(8, dp=2, pp=2))
    others = (
        (even_layout(8, pp=4), *first, even_layout(8, pp=3, devices=[1, 2, 1])),
        (even_layout(8, pp=2, tp=2), even_layout(8, dp=2, tp=2)),
        (even_layout(8, dp=2, cp=2), even_layout(8, pp=2, cp=2), even_layout(8, pp=2, cp=2, virtual=2)),
    )
    beside = gloo_pool.run(4, groups_made, first)[0] - num_groups(first)
    assert beside > 0
    for layouts in others:
        assert gloo_pool.run(4, groups_made, layouts)[0] == beside + num_groups(layouts)


def told_of_revisions(path: str, folders: tuple[str, ...]) -> str:
    """What this rank is told where the ranks load these folders; "" = nothing."""
    mesh = create_meshes([even_layout(2, dp=len(folders))], torch.device("cpu"), TIMEOUT_S).start
    try:
        require_same_revision(path, folders[mesh.rank], mesh)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("folders", "parts"),
    [
        (("/one/hub/aaa", "/two/hub/aaa"), ()),
        (("/one/hub/aaa", "/one/hub/bbb"), ("aaa on ranks [0]; bbb on ranks [1]", '"org/model@aaa"')),
        (("org/model", "/one/hub/bbb"), ("a folder of that name on ranks [0]; bbb on ranks [1]",)),
    ],
)
def test_ranks_that_would_load_other_weights_are_refused(gloo_pool, folders, parts):
    for reported in gloo_pool.run(2, told_of_revisions, "org/model", folders):
        assert bool(reported) == bool(parts)
        assert all(part in reported for part in parts)


def memory_of_all(num_bytes: list[int]) -> float:
    mesh = create_meshes([even_layout(2, pp=2)], torch.device("cpu"), TIMEOUT_S).start
    return -most_of_ranks(-num_bytes[dist.get_rank()], mesh)


def test_every_rank_has_the_least_of_all(gloo_pool):
    assert gloo_pool.run(2, memory_of_all, [2**40 + 1, 2**35 + 3]) == [2**35 + 3] * 2
