from itertools import chain

from hypothesis import given
from hypothesis import strategies as st

from evenload.planning.strategies.baselines import sequential_packs


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
