"""Runs whose layout follows the lengths of their documents, as one rank of a `GlooPool`."""

from collections.abc import Sequence
from pathlib import Path

BATCH = 8
SHORT, LONG = 12, 230
"""Letters of a document; a token each."""


def write_phases(directory: Path, phases: Sequence[str]) -> Path:
    """A corpus whose batches of `BATCH` documents are short ("s") or hold two long ones ("l"), in this order."""
    directory.mkdir()
    for step, phase in enumerate(phases):
        for at in range(BATCH):
            letters = LONG if phase == "l" and at < 2 else SHORT + at
            (directory / f"{step:03}-{at}.txt").write_text("".join(chr(97 + (i * 7 + at) % 26) for i in range(letters)))
    return directory
