"""Layouts whose stages have different numbers of devices, and how channels share a link."""

import msgspec
import pytest

from evenload.cli.options import parse_layout
from evenload.errors import ConfigError
from evenload.types.layout import ParallelLayout, channel_mode, even_layout, read_layout_text


def test_a_layout_is_written_as_it_is_described() -> None:
    layout = read_layout_text("pp=3,devices=1+2+1").layout(8)
    assert layout == even_layout(8, pp=3, devices=[1, 2, 1])
    assert layout.describe() == "pp=3 devices=1+2+1"
    assert layout.stage_counts == (2, 4, 2), "as many layers a device"
    assert (layout.world_size, layout.pipeline_ranks, layout.stage_to_rank) == (4, 4, (0, 1, 3))
    uneven = read_layout_text("pp=3,layers=3+4+1,devices=1+2+1").layout(8)
    assert uneven.describe() == "pp=3 devices=1+2+1 layers=3+4+1"
    assert parse_layout("pp=3,devices=1+2+1", 8, 4) == layout
    with pytest.raises(ConfigError, match="takes 4 devices, there are 8; it has no replicas"):
        parse_layout("pp=3,devices=1+2+1", 8, 8)


def test_it_goes_through_json_and_other_layouts_look_as_before() -> None:
    """What a layout without them looks like decides digests of plans and the names of checkpoints' layouts."""
    layout = even_layout(8, pp=3, devices=[1, 2, 1])
    assert msgspec.json.decode(msgspec.json.encode(layout), type=ParallelLayout) == layout
    usual = even_layout(4, dp=2, pp=2)
    assert msgspec.json.encode(usual) == (
        b'{"dp":2,"cp":1,"pp":2,"tp":1,"stage_layers":[[0,2],[2,4]],"stage_to_rank":[0,1],"generation":0}'
    )
    assert msgspec.json.decode(msgspec.json.encode(usual), type=ParallelLayout) == usual


def test_where_everything_lies() -> None:
    layout = even_layout(8, pp=3, devices=[1, 2, 1])
    assert [layout.stages_of_rank(rank) for rank in range(-1, 4)] == [(), (0,), (1,), (1,), (2,)]
    assert [list(layout.ranks_of_stage(stage)) for stage in range(3)] == [[0], [1, 2], [3]]
    assert [layout.rank_of_pack(1, pack) for pack in range(4)] == [1, 2, 1, 2]
    assert layout.leading_ranks == (0, 1, 1, 3)
    assert layout.data_sizes == (1, 2, 2, 1)
    assert [layout.data_rank(pp_rank=rank, dp_rank=0) for rank in range(4)] == [0, 0, 1, 0]
    assert [layout.linked_ranks(stage) for stage in range(2)] == [[(0, 1), (0, 2)], [(1, 3), (2, 3)]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pp=3,devices=1+2", "devices=1[+]2 must be 3 numbers of at least 1"),
        ("pp=2,devices=2+2", "devices=2[+]2 are as many for every stage; write dp=2 instead"),
        ("pp=2,dp=2,devices=1+2", "with dp=2 cp=1 tp=1 virtual=1: stages with different numbers of devices are of one"),
        ("pp=2,tp=2,devices=1+2", "tp=2"),
        ("pp=2,cp=2,devices=1+2", "cp=2"),
        ("pp=2,virtual=2,devices=1+2+1+1", "must be 2 numbers"),
        ("pp=2,devices=1+0", "'devices=1[+]0' is not one of"),
        ("pp=2,devices=1+2,devices=1+2", "devices is given twice"),
        ("pp=2,layers=3+3,devices=1+2", "gives 6 layers"),
    ],
)
def test_what_is_not_tested_together_is_refused(text, message) -> None:
    with pytest.raises(ConfigError, match=message):
        read_layout_text(text).layout(8)


EVEN = even_layout(4, pp=2)
WIDE = read_layout_text("pp=3,devices=1+2+1").layout(4)


@pytest.mark.parametrize(
    ("choice", "device", "layouts", "result"),
    [
        ("auto", "cpu", [EVEN], "directed"),
        ("auto", "cuda", [EVEN], "fifo"),
        ("auto", "cuda", [EVEN, WIDE], "directed"),
        ("directed", "cuda", [EVEN], "directed"),
        ("fifo", "cpu", [EVEN], "fifo"),
    ],
)
def test_one_order_is_the_default_where_transfers_may_wait_for_each_other(choice, device, layouts, result):
    assert channel_mode(choice, device, layouts) == result
