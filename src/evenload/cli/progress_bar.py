"""A bar on standard error while planning takes long; nothing where that is no terminal."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from evenload.explore.batches import OnProgress


@contextmanager
def progress_bar() -> Iterator[OnProgress]:
    """A callback that moves the bar; the bar goes when the work ends."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=None)

        def move(done: int, total: int, what: str) -> None:
            progress.update(task, completed=done, total=total, description=escape(what))

        yield move
