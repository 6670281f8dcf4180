"""Record kind "text": text that is taken as it stands."""

from dataclasses import dataclass
from typing import Any

from evenload.data.encoding.document_encoder import RecordProblem
from evenload.data.encoding.text_encoder import RenderedText


@dataclass(frozen=True)
class PlainText:
    """`Renderer` of kind "text": every token after the first is predicted, and the end-of-document token."""

    column: str
    has_spans: bool = False
    counts_touching: bool = False

    @property
    def columns(self) -> tuple[str, ...]:
        """As of `Renderer`."""
        return (self.column,)

    @property
    def name(self) -> str:
        """As of `Renderer`."""
        return f"text of '{self.column}'"

    def render(self, values: tuple[Any, ...]) -> RenderedText:
        """As of `Renderer`."""
        return RenderedText(check_text(values[0], self.column), end="always")


def check_text(value: Any, column: str) -> str:
    """The value, which must be a string.

    Raises:
        RecordProblem: it is not.
    """
    if isinstance(value, str):
        return value
    held = "nothing" if value is None else f"a value of type {type(value).__name__}"
    raise RecordProblem(f"column '{column}' holds {held} instead of text")
