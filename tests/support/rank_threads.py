"""Ranks as threads that talk through shared memory: real loaders, fast enough for property tests."""

import threading
from concurrent.futures import ThreadPoolExecutor


class ThreadPeers:
    """`Peers` of one process; a rank that fails breaks the barrier, so that no other waits for ever."""

    def __init__(self, rank, size, barrier, board):
        self.rank, self.size, self._barrier, self._board = rank, size, barrier, board

    def share(self, item):
        """Everyone's item, by rank."""
        self._board[self.rank] = item
        self._barrier.wait()
        everything = list(self._board)
        self._barrier.wait()
        return everything

    def gather(self, data):
        assert isinstance(data, bytes)
        return self.share(data)

    def broadcast(self, data):
        assert isinstance(data, bytes)
        return self.share(data)[0]

    def exchange(self, outgoing, incoming):
        assert len(outgoing) == len(incoming) == self.size
        received = [sent[self.rank].copy() for sent in self.share(outgoing)]
        assert [len(part) for part in received] == list(incoming)
        return received


def run_ranks(size, function):
    """`function(rank, peers)` on every rank; the results by rank, or the first rank's error."""
    barrier, board = threading.Barrier(size, timeout=300), [None] * size

    def guarded(rank):
        try:
            return function(rank, ThreadPeers(rank, size, barrier, board))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(guarded, rank) for rank in range(size)]
        errors = [error for future in futures if (error := future.exception()) is not None]
        for error in errors:
            if not isinstance(error, threading.BrokenBarrierError):
                raise error
        return [future.result() for future in futures]
