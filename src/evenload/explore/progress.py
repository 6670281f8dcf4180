"""How long work says how far it is, without knowing a terminal."""

from collections.abc import Callable

OnProgress = Callable[[int, int, str], None]
"""(done, of how many, what comes next)."""


def no_progress(done: int, total: int, what: str) -> None:
    pass
