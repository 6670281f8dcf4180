"""How channels share the way between two ranks where a run does not say."""

import pytest

from evenload.types.layout import channel_mode, even_layout, read_layout_text

EVEN = even_layout(4, pp=2)
WIDE = read_layout_text("pp=3,devices=1+2+1").layout(4)


@pytest.mark.parametrize(
    ("choice", "device", "layouts", "found"),
    [
        ("auto", "cpu", [EVEN], "directed"),
        ("auto", "cuda", [EVEN], "fifo"),
        ("auto", "cuda", [EVEN, WIDE], "directed"),
        ("directed", "cuda", [EVEN], "directed"),
        ("fifo", "cpu", [EVEN], "fifo"),
    ],
)
def test_one_order_is_the_default_where_transfers_may_wait_for_each_other(choice, device, layouts, found):
    assert channel_mode(choice, device, layouts) == found
