"""`LengthUnit`: what lengths of documents count, and texts in that unit.

Without a tokeniser documents are counted in bytes, and nothing may call those tokens. Texts are written for tokens,
once, and `in_unit` makes the others.
"""

import re
from typing import Literal

LengthUnit = Literal["tokens", "bytes"]

# Whole words: names of settings, such as max_pack_tokens and --tokens, stay what they are.
_TOKEN_WORD = re.compile(r"(?<![\w-])(t|T)oken(s?)\b")


def in_unit(text: str, unit: LengthUnit) -> str:
    """A text of ours about tokens, in the unit that was counted."""
    if unit == "tokens":
        return text
    return _TOKEN_WORD.sub(lambda found: f"{'b' if found[1] == 't' else 'B'}yte{found[2]}", text)
