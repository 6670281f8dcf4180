"""A reading thread that is closed delivers nothing any more, whatever it was reading."""

import threading

from evenload.data.reading import workers
from evenload.data.reading.block import BlockCursor, BlockRequest, StreamKey
from evenload.data.reading.stall_clock import StallClock


def test_a_block_that_was_being_read_when_its_thread_was_closed_is_dropped(monkeypatch):
    """Delivered late, it would be the first answer to whoever asks next."""
    reading, go_on, delivered = threading.Event(), threading.Event(), []

    def read_slowly(readers, request):
        reading.set()
        go_on.wait(10)
        return request

    monkeypatch.setattr(workers, "read_block", read_slowly)
    request = BlockRequest(key=StreamKey(part=0, stream=0), epoch=1, cursor=BlockCursor())
    before, clock = set(threading.enumerate()), StallClock(threading.Condition(), 60.0)
    worker = workers.ThreadWorker(0, (), lambda *answer: delivered.append(answer), clock)
    (thread,) = (one for one in threading.enumerate() if one.name == "evenload-read" and one not in before)
    worker.request(request)
    assert reading.wait(10)
    worker.close()
    go_on.set()
    thread.join(10)
    assert not thread.is_alive()
    assert delivered == []
