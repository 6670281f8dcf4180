"""The program of a worker process: receives a job, then requests, and answers each with a block or an error."""

import signal
import sys
import traceback
from multiprocessing.connection import Connection

from evenload.data.reading.workers import make_readers
from evenload.errors import DataError, EvenloadError


def serve(connection: Connection) -> None:
    """Answer requests until the other side closes the connection."""
    job = connection.recv()
    readers = make_readers(job, lambda name: connection.send(("open", name)))
    while True:
        request = connection.recv()
        try:
            outcome = readers[request.key.part].read(request.key.lane, request.epoch, request.cursor)
        except EvenloadError as error:
            outcome = error
        except Exception:
            # Not every exception survives the way to another process; its text does.
            outcome = DataError(f"reading {request} failed unexpectedly:\n{traceback.format_exc()}")
        connection.send(("block", request, outcome))


if __name__ == "__main__":
    # Ctrl-C is for the training process; this one ends with its connection.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        serve(Connection(int(sys.argv[1])))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        sys.exit(0)
