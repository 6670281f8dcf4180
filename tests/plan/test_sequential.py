from itertools import chain

from hypothesis import given
from hypothesis import strategies as st

from evenload.plan.strategies.baselines import sequential_packs


def test_documents_are_cut_where_the_window_ends() -> None:
    forward, backward = sequential_packs([3, 3, 5, 1], 4)
    assert forward == [[(0, 0, 3), (1, 0, 1)], [(1, 1, 3), (2, 0, 2)], [(2, 2, 5), (3, 0, 1)]]
    # Slices last-first; the two slices of a document never share a pack.
    assert backward == [[(0, 0, 3)], [(1, 1, 3)], [(1, 0, 1), (2, 2, 5)], [(2, 0, 2), (3, 0, 1)]]


@given(st.lists(st.integers(1, 30), max_size=30), st.integers(1, 20))
def test_all_windows_but_the_last_are_full_and_both_directions_hold_the_same_slices(lengths, window) -> None:
    forward, backward = sequential_packs(lengths, window)
    sizes = [sum(stop - start for _, start, stop in pack) for pack in forward]
    assert sizes[:-1] == [window] * (len(sizes) - 1)
    assert sum(sizes) == sum(lengths)
    assert sorted(chain(*forward)) == sorted(chain(*backward))
    for pack in backward:
        assert sum(stop - start for _, start, stop in pack) <= window
        assert len({document for document, _, _ in pack}) == len(pack)
