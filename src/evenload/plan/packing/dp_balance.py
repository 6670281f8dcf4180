"""Which replica trains which document: longest processing time first on forward + backward TIME.

SlimPack phase 1 (§4.1.1) balances forward FLOPs; that leaves up to 1.5 % spread because attention's backward is
2.5x and linear's 2x, so we balance predicted seconds of both. O(n log n). LPT is within
4/3 - 1/(3·dp) of the best assignment (Graham 1969); one document longer than its share needs replicas that share it
(`plan.packing.dp_merge`).
"""

import numpy as np
from numpy.typing import NDArray

from evenload.plan.packing.bin_packing import longest_first


def assign_replicas(document_s: NDArray[np.float64], dp: int) -> list[NDArray[np.int64]]:
    """Document indices of every replica, each ascending (arrival order); a replica may be empty.

    Args:
        document_s: float64[n], forward + backward seconds of every document.
    """
    if dp == 1:
        return [np.arange(len(document_s), dtype=np.int64)]
    groups = longest_first(document_s, dp)
    return [np.sort(np.array(group, dtype=np.int64)) for group in groups]
