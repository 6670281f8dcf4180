"""`SharedDirectory`: a folder in the machine's shared memory that goes when its owner goes, however that ends.

Files of `/dev/shm` outlive the processes that write them, which is what they are for, and nobody would remove those of
an owner that was killed. So the owner, which outlives the ranks of a run, holds a lock (`flock`) on the folder itself.
The kernel gives it back when the process ends; folders without one are left over, and the next owner removes them.

Where we differ from names with a process number in them: numbers are used again, and containers that share `/dev/shm`
do not see each other's.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from evenload.errors import ConfigError

SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "evenload-"


@contextlib.contextmanager
def shared_directory(parent: Path = SHARED_MEMORY) -> Iterator[Path]:
    """A new folder of this user's, with nothing in it; removed with all that is in it at the end.

    Raises:
        ConfigError: there is no such parent, or it cannot be written.
    """
    try:
        path, descriptor = _locked_directory(parent)
    except OSError as error:
        raise ConfigError(
            f"no folder for state in shared memory can be made in {parent} ({error.strerror}); a Linux machine has "
            f"{SHARED_MEMORY}, a container with enough of it (such as docker --shm-size)"
        ) from error
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)  # a rank that is being killed may write there still
        os.close(descriptor)


def remove_left_over(parent: Path = SHARED_MEMORY) -> list[tuple[Path, int]]:
    """Remove this user's folders whose owners have ended; which, and the bytes that they held. What processes still
    have mapped stays theirs until they end."""
    removed = []
    for path in sorted(parent.glob(f"{_PREFIX}*")):
        try:
            if path.stat().st_uid != os.getuid() or not path.is_dir():
                continue
            descriptor = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            continue  # another owner was faster
        try:
            if _lock(descriptor):
                num_bytes = held_bytes(path)
                shutil.rmtree(path, ignore_errors=True)
                removed.append((path, num_bytes))
        finally:
            os.close(descriptor)
    return removed


def held_bytes(directory: Path) -> int:
    """Of shared memory, by the files of a folder."""
    total = 0
    for path in directory.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            total += path.stat().st_blocks * 512
    return total


def _locked_directory(parent: Path) -> tuple[Path, int]:
    while True:
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        descriptor = os.open(path, os.O_RDONLY)
        # Whoever looked for folders without an owner just now may have taken this one for left over.
        with contextlib.suppress(FileNotFoundError):
            if _lock(descriptor) and os.path.samestat(os.fstat(descriptor), path.stat()):
                return path, descriptor
        os.close(descriptor)


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
