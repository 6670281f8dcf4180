"""Cut this process's connections to other ranks, so that everything that waits for them fails at once.

gloo has no way to give up a transfer: `abort` of its groups does nothing (torch 2.13), and a rank that waits for a
living one, which itself has given up, would wait for the whole timeout. A socket that is shut down breaks the pair on
both ends: gloo reports a closed connection to whoever waits on it, in milliseconds. Linux only (`/proc/self/fd`).
"""

import contextlib
import os
import socket
from collections.abc import Collection
from pathlib import Path

_OPEN_FILES = Path("/proc/self/fd")


def can_sever() -> bool:
    """Whether this system tells a process its sockets."""
    return _OPEN_FILES.is_dir()


def open_sockets() -> frozenset[str]:
    """Names of the sockets that this process has open; a name is never used again."""
    return frozenset(_sockets())


def sever_all_but(spared: Collection[str]) -> int:
    """Shut down every TCP connection of this process but those of `open_sockets` that are spared; how many there were.
    Whoever uses one gets an error."""
    cut = 0
    for name, number in _sockets().items():
        if name in spared:
            continue
        # An error where nobody is connected: it listens, or is closed already.
        with contextlib.suppress(OSError), _copy(number) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6):
                connection.getpeername()
                connection.shutdown(socket.SHUT_RDWR)
                cut += 1
    return cut


def _copy(number: int) -> socket.socket:
    """By a file number of its own, which the caller closes; the owner of the original goes on owning that."""
    copy = os.dup(number)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)  # meanwhile the number is of a file that is no socket
        raise


def _sockets() -> dict[str, int]:
    """File numbers by name."""
    found = {}
    for entry in os.listdir(_OPEN_FILES):
        try:
            name = os.readlink(_OPEN_FILES / entry)
        except OSError:
            continue  # closed meanwhile
        if name.startswith("socket:"):
            found[name] = int(entry)
    return found
