import subprocess
import sys
import threading
import time
import weakref

import pytest

from evenload.feed.prefetcher import Prefetcher


class Counter:
    """Gives 0, 1, 2, ... and then None, or an error at a number."""

    def __init__(self, count=10**9, fail_at=None):
        self.made, self._count, self._fail_at = 0, count, fail_at

    def __call__(self):
        if self.made == self._fail_at:
            raise ValueError(f"at {self.made}")
        self.made += 1
        return self.made - 1 if self.made <= self._count else None


def settled(counter, want):
    """Wait until so many were made; then see that it stays there."""
    deadline_s = time.monotonic() + 120
    while counter.made < want and time.monotonic() < deadline_s:
        time.sleep(0.001)
    time.sleep(0.03)
    return counter.made


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_items_come_in_order_and_none_ever_after(depth):
    ahead = Prefetcher(Counter(5), depth, "test")
    assert [ahead.next() for _ in range(8)] == [0, 1, 2, 3, 4, None, None, None]
    ahead.close()


def test_no_more_are_made_ahead_than_allowed():
    counter = Counter()
    ahead = Prefetcher(counter, 3, "test")
    assert settled(counter, 3) == 3
    ahead.next()
    assert settled(counter, 4) == 4
    ahead.close()
    assert counter.made == 4


def test_close_makes_all_that_was_allowed_so_that_ranks_make_equally_many_calls():
    """A rank that closes early must not leave the others alone in a collective call."""
    gate = threading.Event()
    made = []

    def make():
        gate.wait(10)
        made.append(len(made))
        return made[-1]

    ahead = Prefetcher(make, 4, "test")
    closing = threading.Thread(target=ahead.close)
    closing.start()
    gate.set()
    closing.join(10)
    assert made == [0, 1, 2, 3]
    assert ahead.next() is None


@pytest.mark.parametrize("depth", [0, 2])
def test_an_error_comes_in_its_place_and_ends_the_items(depth):
    ahead = Prefetcher(Counter(fail_at=2), depth, "test")
    assert [ahead.next(), ahead.next()] == [0, 1]
    with pytest.raises(ValueError, match="at 2"):
        ahead.next()
    assert ahead.next() is None
    ahead.close()


def test_a_dropped_reader_ends_its_thread():
    ahead = Prefetcher(Counter(), 2, "evenload-dropped")
    ahead.next()
    del ahead
    deadline_s = time.monotonic() + 120
    while any(thread.name == "evenload-dropped" for thread in threading.enumerate()):
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("to_the_end", [True, False])
def test_what_makes_items_is_let_go_with_the_last_reference(depth, to_the_end):
    """Process groups and workers hang on it: those of every run would stay, with their threads."""
    counter = Counter(5)
    alive = weakref.ref(counter)
    ahead = Prefetcher(counter, depth, "test")
    assert [ahead.next() for _ in range(8 if to_the_end else 2)][:2] == [0, 1]
    threads = [thread for thread in threading.enumerate() if thread.name == "test"]
    del counter, ahead
    for thread in threads:
        thread.join(120)
    assert alive() is None


def test_the_process_ends_after_what_is_being_made():
    """A thread inside a collective when the interpreter goes away aborted the process ("terminate called ...")."""
    code = """
import time
from evenload.feed.prefetcher import Prefetcher

def make():
    time.sleep(0.3)
    print("made", flush=True)
    return 1

ahead = Prefetcher(make, 2, "test")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.split() == ["made", "made"]
