"""`nearest_name`: the known name that a user most likely meant."""

import difflib
from collections.abc import Iterable

LEAST_SIMILARITY = 0.4
"""Of 1; among few choices a name that shares half of its letters is usually what was meant."""


def nearest_name(name: str, known: Iterable[str], similarity: float = LEAST_SIMILARITY) -> str | None:
    """The most similar of `known`, upper and lower case alike; None where none is similar."""
    by_lower = {one.lower(): one for one in known}
    found = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=similarity)
    return by_lower[found[0]] if found else None


def did_you_mean(name: str, known: Iterable[str], similarity: float = LEAST_SIMILARITY) -> str:
    """ "did you mean 'x'? ", to stand before the list of choices; "" where nothing is similar."""
    near = nearest_name(name, known, similarity)
    return f"did you mean '{near}'? " if near else ""
