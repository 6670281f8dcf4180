"""`Action` and `Schedule`: in which order every pipeline rank runs its packs."""

import re
from typing import Literal

from evenload.errors import InvalidPlanError
from evenload.types.base import Frozen

ActionKind = Literal["F", "I", "W", "B"]
_ACTION = re.compile(r"(\d+)([FIWB])(\d+)")


class Action(Frozen, gc=False):  # holds numbers and a name only; see types/document.py
    """One computation: kinds as in PyTorch's schedules (F forward, B full backward, I input gradient,
    W weight gradient), `stage` the virtual stage, `pack` the forward or backward pack index."""

    kind: ActionKind
    stage: int
    pack: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.pack}"


def parse_action(text: str) -> Action:
    """Inverse of `str(action)`: `2F0` is the forward of pack 0 on stage 2."""
    match = _ACTION.fullmatch(text)
    if match is None:
        raise InvalidPlanError(f"'{text}' is not an action such as 2F0 (stage, one of F I W B, pack)")
    return Action(kind=match[2], stage=int(match[1]), pack=int(match[3]))  # type: ignore[arg-type]


class Schedule(Frozen):
    """Per pipeline rank the actions in order."""

    ranks: tuple[tuple[Action, ...], ...]

    def grid(self) -> str:
        """One line a rank, for messages and debugging."""
        return "\n".join(f"rank {rank}: " + " ".join(map(str, row)) for rank, row in enumerate(self.ranks))
