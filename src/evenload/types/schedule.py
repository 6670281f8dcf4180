"""`Action` and `Schedule`: in which order every pipeline rank runs its packs."""

import re
from collections.abc import Iterable
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


def completing_actions(actions: Iterable[tuple[str, int]]) -> dict[int, tuple[int, ...]]:
    """Of one rank's actions, as (kind, stage), by place: stages whose weight gradients are complete when it ends.

    With the last action that is no forward, stage by stage. Where a rank has several stages and W's, whose order
    follows from nothing but the plan, all stages with the last of them: replicas may complete stages in another order,
    and transfers that begin there would have none (docs/decisions/03-zero-1-and-overlapped-reduction.md).
    """
    last: dict[int, int] = {}
    has_weights = False
    for at, (kind, stage) in enumerate(actions):
        if kind != "F":
            last[stage] = at
            has_weights |= kind == "W"
    if has_weights and len(last) > 1:
        last = dict.fromkeys(last, max(last.values()))
    found: dict[int, tuple[int, ...]] = {}
    for stage, at in sorted(last.items()):
        found[at] = (*found.get(at, ()), stage)
    return found


class Schedule(Frozen):
    """Per pipeline rank the actions in order."""

    ranks: tuple[tuple[Action, ...], ...]

    def grid(self) -> str:
        """One line a rank, for messages and debugging."""
        return "\n".join(f"rank {rank}: " + " ".join(map(str, row)) for rank, row in enumerate(self.ranks))
