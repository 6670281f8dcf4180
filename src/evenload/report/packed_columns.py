"""Numpy columns as compact text inside a page: integers of least width, gzip, base64.

A comparison of ten strategies over four steps on 64 devices is some hundred thousand tasks. As JSON that would be
tens of megabytes to parse before anything shows; as packed columns it is a few bytes a task, and a block is unpacked
only when its step is looked at. Times and bytes are stored as differences, which compress to a fraction.
Price: one pass of zlib over 10 to 20 bytes a task. `packed_columns.js` is the inverse; browsers have gzip built in.
"""

import base64
import gzip
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

_INTEGERS = (np.uint8, np.int8, np.uint16, np.int16, np.uint32, np.int32)
_LEVEL = 9


def pack_columns(columns: Mapping[str, NDArray | Sequence[int]]) -> tuple[str, list[tuple[str, str, int]]]:
    """Encode one-dimensional columns.

    Integers take the narrowest type that holds them (beyond 32 bits float64, exact to 2**53); floats stay float64.

    Returns:
        Base64 text, and per column its (name, type, length) in the order in which the bytes lie; types as `u1 i1 u2 i2
        u4 i4 f8`, little-endian, widest first so that every column is aligned.
    """
    narrowed = [(name, _narrow(np.asarray(column))) for name, column in columns.items()]
    narrowed.sort(key=lambda item: -item[1].dtype.itemsize)
    # A fixed time stamp, so that the same report has the same bytes.
    content = gzip.compress(b"".join(column.tobytes() for _, column in narrowed), _LEVEL, mtime=0)
    directory = [(name, column.dtype.str[1:], len(column)) for name, column in narrowed]
    return base64.b64encode(content).decode("ascii"), directory


def _narrow(column: NDArray) -> NDArray:
    if column.dtype.kind == "f":
        return column.astype("<f8")
    low, high = (int(column.min()), int(column.max())) if len(column) else (0, 0)
    for candidate in _INTEGERS:
        limits = np.iinfo(candidate)
        if limits.min <= low and high <= limits.max:
            return column.astype(np.dtype(candidate).newbyteorder("<"))
    return column.astype("<f8")
