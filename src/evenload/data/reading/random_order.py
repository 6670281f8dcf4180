"""Seeded permutations that need no state: counter-based (Philox), keyed by seed and epoch.

A permutation depends on what it is for and on nothing that happened before, so any of them can be made again after a
resume, on any rank. numpy keeps the raw Philox stream stable over versions, its distributions not.
"""

import numpy as np

SEGMENTS, BLOCKS = 1, 2
"""Purposes, kept apart in the counter."""


def permutation(size: int, seed: int, epoch: int, purpose: int, user: int, index: int) -> list[int]:
    """A permutation of `range(size)`.

    Args:
        user: which of several independent users of the purpose, below 2**64.
        index: which permutation of that user.
    """
    key = np.array([seed, epoch], dtype=np.uint64)
    # Philox counts up the first word; the others tell users apart.
    counter = np.array([0, index, purpose, user], dtype=np.uint64)
    numbers = np.atleast_1d(np.random.Philox(key=key, counter=counter).random_raw(size))
    return np.argsort(numbers, kind="stable").tolist()
