"""What this process holds, told by the system."""

import numpy as np
import pytest
import torch

from evenload.runtime.device import forget_peak_process_bytes, peak_process_bytes, resident_bytes

MEBIBYTE = 2**20
CPU = torch.device("cpu")

pytestmark = pytest.mark.skipif(resident_bytes() is None, reason="this system has no /proc/self/status")


def peak() -> int:
    found = peak_process_bytes(CPU)
    assert found is not None
    return found


def test_memory_that_is_written_is_counted_and_its_peak_kept() -> None:
    forget_peak_process_bytes(CPU)
    before = peak()
    block = np.ones(200 * MEBIBYTE, np.uint8)
    assert peak() - before > 180 * MEBIBYTE
    del block
    assert peak() - before > 180 * MEBIBYTE
