"""A process ends itself where its job's store is silent, and only there."""

import re
import threading
import time

import pytest

from evenload.runtime.comm import lifeline
from evenload.runtime.comm.lifeline import Lifeline

LIMIT_S = 0.3


class SilentStore:
    """Answers so often, then never."""

    def __init__(self, answers: int) -> None:
        self.answers = answers

    def check(self, keys: list[str]) -> bool:
        self.answers -= 1
        if self.answers < 0:
            threading.Event().wait()
        return False


@pytest.fixture
def ended():
    """What the process would have said, and when that was."""
    said: list[str] = []
    return said


def started(connect, ended, limit_s=LIMIT_S) -> Lifeline:
    return Lifeline(connect, limit_s, ended.append, interval_s=0.02)


def wait_until(is_so) -> None:
    deadline_s = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


@pytest.mark.parametrize("answers", [0, 3])
def test_a_silent_store_ends_the_process(ended, answers):
    store, from_s = SilentStore(answers), time.monotonic()
    started(lambda: store, ended)
    wait_until(lambda: ended)
    assert time.monotonic() - from_s >= LIMIT_S
    # Not how many seconds: a thread may wait for a core.
    assert re.match(r"the job's store has not answered for \d+ s: the link to its machine is cut", ended[0])


def test_a_store_that_cannot_be_reached_ends_the_process(ended):
    def connect():
        raise RuntimeError("timed out")

    started(connect, ended)
    wait_until(lambda: ended)


def test_neither_a_store_that_answers_nor_one_that_has_ended_does(ended):
    """Whoever held a store that breaks the connection has ended; that ranks learn otherwise."""

    class Answers(SilentStore):
        def check(self, keys):
            if self.answers == 0:
                raise RuntimeError("Connection reset by peer")
            self.answers -= 1
            return False

    limit_s = 3.0  # far more than a thread waits for a core
    lasting, ending = SilentStore(10**9), Answers(3)
    lives = started(lambda: lasting, ended, limit_s)
    started(lambda: ending, ended, limit_s)
    before = lasting.answers
    time.sleep(limit_s + 1)
    assert lasting.answers < before
    assert ending.answers == 0
    assert ended == []
    lives.close()


def test_what_is_closed_watches_no_more(ended, monkeypatch):
    def watching() -> int:
        return sum(thread.name == "evenload-lifeline-watches" for thread in threading.enumerate())

    monkeypatch.setattr(lifeline, "_ANSWER_S", 0.1)  # the store never answers
    wait_until(lambda: watching() == 0)  # those of earlier tests
    store = SilentStore(0)
    lives = started(lambda: store, ended, limit_s=600.0)
    assert watching() == 1
    lives.close()
    wait_until(lambda: watching() == 0)
    assert ended == []


def test_nobody_asks_the_store_any_more_once_it_is_closed(ended):
    """A thread that comes out of the store while Python ends aborts the process."""

    class Slow:
        def __init__(self) -> None:
            self.asked, self.answered = threading.Event(), 0

        def check(self, keys):
            self.asked.set()
            time.sleep(0.2)
            self.answered += 1
            return False

    store = Slow()
    lives = started(lambda: store, ended, limit_s=600.0)
    assert store.asked.wait(60)
    lives.close()
    answered = store.answered
    assert answered > 0
    time.sleep(0.5)
    assert store.answered == answered
