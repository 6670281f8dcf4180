"""When waiting for a worker ends, by a clock that the tests move."""

import threading

import pytest

from evenload.data.reading.stall_clock import START_TIMEOUT_S, StallClock
from evenload.errors import DataError


class HandClock:
    """Stands still unless it is moved."""

    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def hand():
    return HandClock()


@pytest.fixture
def clock(hand):
    clock = StallClock(threading.Condition(), 10.0, hand)
    clock.starts(0)
    return clock


def test_the_start_does_not_count_as_reading(clock, hand):
    hand.now_s += START_TIMEOUT_S - 1
    assert clock.left_s(0, 100.0, "block 0") == 1
    clock.has_started(0)
    assert clock.left_s(0, 100.0, "block 0") == 10


def test_a_start_has_a_limit_of_its_own(clock, hand):
    hand.now_s += START_TIMEOUT_S
    with pytest.raises(DataError, match=r"worker 0 has not started within 300 s"):
        clock.left_s(0, 100.0, "block 0")


def test_who_allows_more_for_reading_allows_it_for_the_start(hand):
    clock = StallClock(threading.Condition(), 1000.0, hand)
    clock.starts(0)
    hand.now_s += 900
    assert clock.left_s(0, 100.0, "block 0") == 100


def test_a_successor_starts_anew(clock, hand):
    clock.has_started(0)
    hand.now_s += 9
    clock.starts(0)
    hand.now_s += 9
    assert clock.left_s(0, 100.0, "block 0") == START_TIMEOUT_S - 9


def test_files_and_blocks_are_signs_of_life_and_a_stall_names_the_last_file(clock, hand):
    clock.has_started(0)
    hand.now_s += 9
    clock.opens(0, "a.jsonl")
    hand.now_s += 9
    clock.delivers(0)
    hand.now_s += 9
    assert clock.left_s(0, 100.0, "block 0") == 1
    hand.now_s += 1
    with pytest.raises(DataError, match=r"nothing for 10 s; it was reading a\.jsonl \(stream 3, block 7\)"):
        clock.left_s(0, 100.0, "stream 3, block 7")


def test_time_in_which_nothing_was_asked_does_not_count(clock, hand):
    clock.has_started(0)
    hand.now_s += 50
    assert clock.left_s(0, hand.now_s, "block 0") == 10
