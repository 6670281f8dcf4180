"""`help_text`: a command's docstring as its help, wrapped by the terminal and not where the source was."""

import inspect
from collections.abc import Callable
from typing import Any


def help_text(command: Callable[..., Any]) -> str:
    """Lines of a paragraph are joined; those of an indented block stay as they are."""
    paragraphs = (inspect.getdoc(command) or "").split("\n\n")
    return "\n\n".join(one if _is_block(one) else " ".join(one.splitlines()) for one in paragraphs)


def _is_block(paragraph: str) -> bool:
    return paragraph.startswith("    ")
