"""Record kind "text": text that is taken as it stands."""

from typing import Any

from evenload.data.encoding.document_encoder import RecordProblem
from evenload.data.encoding.text_encoder import RenderedText


class PlainText:
    """`Renderer` of kind "text": every token after the first is predicted, and the end-of-document token."""

    has_spans = counts_touching = False

    def __init__(self, column: str) -> None:
        self.columns: tuple[str, ...] = (column,)
        self.name = f"text of '{column}'"

    def render(self, values: tuple[Any, ...]) -> RenderedText:
        return RenderedText(check_text(values[0], self.columns[0]), end="always")


def check_text(value: Any, column: str) -> str:
    """The value, which must be a string.

    Raises:
        RecordProblem: it is not.
    """
    if isinstance(value, str):
        return value
    held = "nothing" if value is None else f"a value of type {type(value).__name__}"
    raise RecordProblem(f"column '{column}' holds {held} instead of text")
