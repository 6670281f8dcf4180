import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from evenload.data.window import ShuffleWindow, file_order


def drain(window, items, epoch=0):
    """Draw everything through the window, full before each draw."""
    window.restart(epoch)
    drawn, source = [], iter(items)
    while True:
        while not window.is_full and (item := next(source, None)) is not None:
            window.add(item)
        if not len(window):
            return drawn
        drawn.append(window.draw())


@given(st.integers(0, 300), st.integers(1, 40), st.integers(0, 2**63 - 1), st.integers(0, 5))
def test_window_gives_everything_once_and_nothing_too_early(size, capacity, seed, epoch):
    drawn = drain(ShuffleWindow(capacity, seed), range(size), epoch)
    assert sorted(drawn) == list(range(size))
    # At draw t the window has seen items 0 .. t + capacity - 1.
    assert all(item < position + capacity for position, item in enumerate(drawn))
    if capacity == 1:
        assert drawn == list(range(size))


def test_order_depends_on_seed_and_epoch_and_is_well_mixed():
    orders = {(seed, epoch): drain(ShuffleWindow(50, seed), range(2000), epoch) for seed in (0, 1) for epoch in (0, 1)}
    assert len({tuple(order) for order in orders.values()}) == 4
    for order in orders.values():
        moved = np.abs(np.array(order) - np.arange(2000))
        assert moved.mean() > 25  # a window of 50 moves a document by about 50 on average


def test_saved_window_draws_the_same():
    """Across the borders of a block of random numbers (1024) too."""

    def feed(window, items):
        for item in items:
            yield window.draw()
            window.add(item)

    whole = ShuffleWindow(7, seed=3)
    whole.restart(2, items=range(7))
    draws = list(feed(whole, range(7, 2500)))
    for item in (7, 8, 340, 1030, 1031, 1032, 2054, 2055, 2056):
        copy = ShuffleWindow(7, seed=3)
        before = ShuffleWindow(7, seed=3)
        before.restart(2, items=range(7))
        assert list(feed(before, range(7, item))) == draws[: item - 7]
        copy.restart(2, before.num_draws, before.items)
        assert list(feed(copy, range(item, 2500))) == draws[item - 7 :]


def test_order_is_pinned():
    """A run saved by an older version has to go on in the same order."""
    assert file_order(8, seed=1, epoch=2) == [3, 1, 5, 6, 0, 7, 2, 4]
    assert drain(ShuffleWindow(4, seed=1), range(10), epoch=2) == [1, 3, 0, 6, 5, 4, 8, 2, 9, 7]


def test_first_draws_are_uniform():
    """A biased draw would favour early documents of every run."""
    counts = np.zeros(5)
    for seed in range(4000):
        window = ShuffleWindow(5, seed)
        window.restart(0)
        for item in range(5):
            window.add(item)
        counts[window.draw()] += 1
    assert np.all(np.abs(counts - 800) < 6 * np.sqrt(800 * 0.8))


@given(st.integers(0, 50), st.integers(0, 2**63 - 1), st.integers(0, 10))
def test_file_order_is_a_permutation(num_files, seed, epoch):
    order = file_order(num_files, seed, epoch)
    assert sorted(order) == list(range(num_files))
    assert order == file_order(num_files, seed, epoch)


def test_file_order_differs_by_seed_and_epoch():
    assert len({tuple(file_order(20, seed, epoch)) for seed in range(4) for epoch in range(4)}) == 16
