"""What a `SparseMemory` takes, as the system counts it."""

import os

from evenload.runtime.stages.twin_layer import SparseMemory


def taken_bytes(memory: SparseMemory) -> int:
    """Of pages that were touched and not released."""
    _, descriptor, _ = memory.address
    return os.fstat(descriptor).st_blocks * 512
