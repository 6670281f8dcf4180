"""`SliceColumns.packs_at`: some packs of many, beside the same packs taken one by one."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from evenload.types.columns import SliceColumns, joined_ranges, whole_document_columns


@given(st.lists(st.lists(st.integers(1, 9), max_size=3), min_size=1, max_size=6), st.data())
def test_some_packs_are_those_named_in_that_order(lengths: list[list[int]], data: st.DataObject) -> None:
    count = len(lengths)
    columns = SliceColumns.from_ranges(
        [[(at, place, place + tokens) for place, tokens in enumerate(pack)] for at, pack in enumerate(lengths)]
    )
    packs = data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=8))
    found, index = columns.packs_at(np.array(packs))
    one_by_one = SliceColumns.concat([columns.pack_range(pack, pack + 1) for pack in packs], [0] * len(packs))
    for name in ("doc", "start", "stop", "pack_offset", "pad_to", "cp"):
        np.testing.assert_array_equal(getattr(found, name), getattr(one_by_one, name))
    np.testing.assert_array_equal(columns.start[index], found.start)


def test_packs_keep_what_they_are_padded_to() -> None:
    columns = whole_document_columns([[0, 1], [2]], np.array([3, 5, 7]), padded=True)
    found, index = columns.packs_at(np.array([1, 0, 1]))
    assert found.pad_to.tolist() == columns.pad_to[[1, 0, 1]].tolist()
    assert found.pad_to.any()
    assert index.tolist() == [2, 0, 1, 2]


def test_no_ranges_are_no_numbers() -> None:
    nothing = np.zeros(0, np.int64)
    assert joined_ranges(nothing, nothing).tolist() == []
    assert joined_ranges(np.array([4, 9, 2]), np.array([2, 0, 3])).tolist() == [4, 5, 2, 3, 4]
