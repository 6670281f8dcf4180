"""The program of a worker process: receives a job, says so, and answers each request with a block or an error."""

import pickle
import signal
import sys
from multiprocessing.connection import Connection

from evenload.data.reading.workers import make_readers, read_block


def serve(connection: Connection) -> None:
    job = pickle.loads(connection.recv_bytes())
    readers = make_readers(job, lambda name: connection.send(("open", name)))
    connection.send(("started",))
    while True:
        request = connection.recv()
        connection.send(("block", request, read_block(readers, request)))


if __name__ == "__main__":
    # Ctrl-C is for the training process; this one ends with its connection.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        serve(Connection(int(sys.argv[1])))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        sys.exit(0)
