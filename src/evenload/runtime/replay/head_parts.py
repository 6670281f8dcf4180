"""`HeadPart`: key heads whose keys and values travel together (docs/decisions/0038-context-transfers-in-parts.md)."""

import itertools
from typing import NamedTuple

from evenload.errors import InvalidPlanError


class HeadPart(NamedTuple):
    """Key heads that travel together, and the query heads that read them."""

    keys: slice
    queries: slice


def head_parts(num_heads: int, kv_heads: int, parts: int) -> tuple[HeadPart, ...]:
    """Parts of about equal size, smaller ones first, for nothing hides the first transfer.

    Raises:
        InvalidPlanError: there are fewer key heads than parts.
    """
    if parts > kv_heads:
        raise InvalidPlanError(
            f"keys and values are planned to travel in {parts} parts, but this rank has {kv_heads} key heads; plan for "
            "the layout and the model that run"
        )
    edges, repeat = [kv_heads * index // parts for index in range(parts + 1)], num_heads // kv_heads
    return tuple(
        HeadPart(slice(low, high), slice(low * repeat, high * repeat)) for low, high in itertools.pairwise(edges)
    )
