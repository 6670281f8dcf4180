"""What a profile has measured so far, in a file from which a second call goes on.

One JSON object beside the cost file. It is replaced as a whole after every pass, so that it is never half written, and
belongs to one task: another model, layout, device or version begins anew.
"""

from pathlib import Path

import msgspec

from evenload.types.base import Frozen

Pass = dict[str, float]
"""Seconds of one rank's pass by what was timed."""
TIMINGS = 4
"""Of what a pass times; a file whose passes timed something else belongs to another task."""


class PartialProfile(Frozen):
    """Args:
    task: what is measured, as text; a file of another task is not used.
    rounds: of the grid, by index; chosen once, so that all passes time the same.
    beside_rows: queries of the attention that runs beside a transfer; 0 = none does.
    seconds: spent so far.
    passes: by pass and rank.
    """

    task: str
    rounds: tuple[int, ...] = ()
    beside_rows: int = 0
    seconds: float = 0.0
    passes: tuple[tuple[Pass, ...], ...] = ()


def partial_path(output: Path) -> Path:
    return output.with_name(f"{output.name}.partial")


def read_partial(path: Path, task: str) -> tuple[PartialProfile, str]:
    """What was measured of this task, and a sentence about it where there is a file; nothing measured where it is of
    another task or cannot be read."""
    if not path.is_file():
        return PartialProfile(task=task), ""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=PartialProfile)
    except (OSError, msgspec.MsgspecError) as error:
        return PartialProfile(task=task), f"{path} cannot be read ({error}): measured from the beginning"
    if found.task != task:
        return PartialProfile(task=task), (
            f"{path} is of another measurement ({found.task}): measured from the beginning"
        )
    return found, f"goes on from {path}: {len(found.passes)} passes, {found.seconds:.0f} s"


def write_partial(path: Path, partial: PartialProfile) -> None:
    new = path.with_name(f"{path.name}.new")
    new.write_bytes(msgspec.json.encode(partial))
    new.replace(path)
