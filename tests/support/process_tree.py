"""The processes under a launcher, as Linux tells them."""

from contextlib import suppress
from pathlib import Path


def children_of(pid: int) -> list[int]:
    """Process ids of the children of a live process, those of all its threads."""
    children = []
    for of_thread in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended meanwhile
            children += [int(child) for child in of_thread.read_text().split()]
    return children


def ranks_of(launcher: int) -> list[int]:
    """Process ids of the two ranks under a launcher, in rank order: the children of its fork server."""
    (server,) = (pid for pid in children_of(launcher) if "multiprocessing.forkserver" in _command_line(pid))
    ranks = children_of(server)
    assert len(ranks) == 2
    return ranks


def family_of(pid: int) -> list[int]:
    """Process ids of all below a process."""
    children = children_of(pid)
    return children + [below for child in children for below in family_of(child)]


def has_ended(pid: int) -> bool:
    """It is gone, or nobody has asked for its exit code yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def _command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()
