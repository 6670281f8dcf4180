"""`Backend`: which of two equal implementations runs; never chosen by a silent fallback."""

from typing import Literal

Backend = Literal["native", "python"]
"""`native` is the compiled core, `python` its readable twin with the same bits."""
