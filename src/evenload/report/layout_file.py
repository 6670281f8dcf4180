"""`layouts.jsonl`: what a run decided about its layout before every step, one JSON object a step, appended, read back.

A torn last line (a crash while writing) is left out, as in `metrics.jsonl`; `metrics_file.drop_torn_line` cuts it off
before a resumed run appends. Steps that a resumed run repeats stand there twice: the last one counts.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from evenload.errors import DataError
from evenload.types.layout_decision import LayoutDecision


def append_decision(path: str | os.PathLike[str], decision: LayoutDecision) -> None:
    """Add one step to the file, made if needed."""
    with open(path, "ab") as file:
        file.write(msgspec.json.encode(decision) + b"\n")


def read_decisions(path: str | os.PathLike[str]) -> tuple[LayoutDecision, ...]:
    """By ascending step; () where there is no file. `DataError` where a whole line is no decision."""
    try:
        *lines, _ = Path(path).read_bytes().split(b"\n")
    except FileNotFoundError:
        return ()
    return _latest([_decode(line, f"{path}, line {number}") for number, line in enumerate(lines, start=1)])


def _latest(decisions: Sequence[LayoutDecision]) -> tuple[LayoutDecision, ...]:
    latest = {decision.step: decision for decision in decisions}
    return tuple(latest[step] for step in sorted(latest))


def _decode(line: bytes, where: str) -> LayoutDecision:
    try:
        return msgspec.json.decode(line, type=LayoutDecision)
    except msgspec.MsgspecError as error:
        raise DataError(
            f"{where} is no decision about a layout ({error}); remove the line or restore the file"
        ) from error
