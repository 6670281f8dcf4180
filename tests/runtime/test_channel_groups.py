"""Groups of channels on NCCL: their options, and that nothing else takes them, by what the pool would make."""

from datetime import timedelta

import pytest
import torch.distributed as dist

from evenload.runtime.comm.mesh import GroupPool

TIMEOUT = timedelta(seconds=7)


@pytest.fixture
def made(monkeypatch):
    result = []

    def new_group(ranks, **options):
        result.append((tuple(ranks), options))
        return object()

    monkeypatch.setattr(dist, "new_group", new_group)
    return result


def test_on_nccl_a_channel_has_groups_of_its_own_kind(made, monkeypatch):
    monkeypatch.setattr("evenload.runtime.comm.mesh.channel_options", lambda timeout: ("few", timeout))
    pool = GroupPool("nccl", TIMEOUT)
    pool.begin_layout()
    channel, data = pool.take([0, 1], is_channel=True), pool.take([0, 1])
    pool.begin_layout()
    assert pool.take([0, 1]) is data
    assert pool.take([0, 1], is_channel=True) is channel
    assert [options["pg_options"] for _, options in made] == [("few", TIMEOUT), None]


def test_elsewhere_layouts_share_groups_whatever_they_carry(made):
    pool = GroupPool("gloo", TIMEOUT)
    pool.begin_layout()
    first = pool.take([0, 1], is_channel=True)
    pool.begin_layout()
    assert pool.take([0, 1]) is first
    assert made[0][1]["pg_options"] is None
