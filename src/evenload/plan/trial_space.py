"""The space `auto` searches for one replica: a `Trial` is a point, `neighbours` are one step away from it.

cut          "symmetric" chain-free slices, "asymmetric" cuts of both directions, "whole" documents by LPT
count        packs aimed at, before tapering
token_weight what a token's linear work counts when cutting: 2 evens out tokens, hence memory (λ of oracle §3)
taper        halvings of the first forward and of the last backward pack (`plan.pack_halving`)
alternate, lookahead, split    of the list schedule (`schedule.packflow`)
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

Cut = Literal["symmetric", "asymmetric", "whole"]

LOOKAHEADS: tuple[int | None, ...] = (None, 3, 0)
TAPERS = ((0, 0), (0, 1), (1, 1), (1, 2), (2, 3))


@dataclass(frozen=True)
class Setting:
    """How packs are cut."""

    cut: Cut
    count: int
    token_weight: int = 1
    taper: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Trial:
    """Packs under one list schedule."""

    setting: Setting
    alternate: bool = False
    lookahead: int | None = None
    split: bool = False

    def describe(self) -> str:
        """For reports."""
        setting = self.setting
        parts = [
            f"{setting.cut} cuts" if setting.cut != "whole" else "whole documents",
            f"token weight {setting.token_weight}" if setting.token_weight != 1 else "",
            f"taper {setting.taper[0]}+{setting.taper[1]}" if setting.taper != (0, 0) else "",
            "list alternate" if self.alternate else "list",
            f"look-ahead {self.lookahead}" if self.lookahead is not None else "",
            "I and W" if self.split else "",
        ]
        return ", ".join(part for part in parts if part)


def neighbours(trial: Trial, *, pp: int, cuts: tuple[Cut, ...], may_split: bool) -> Iterator[Trial]:
    """Trials that differ in one coordinate; the cheap ones, which keep the packs, first."""
    if pp > 1:
        yield replace(trial, alternate=not trial.alternate)
        for lookahead in LOOKAHEADS:
            if lookahead != trial.lookahead:
                yield replace(trial, lookahead=lookahead)
        if may_split:
            yield replace(trial, split=not trial.split)
        at = TAPERS.index(trial.setting.taper)
        for taper in TAPERS[max(0, at - 1) : at + 2]:
            if taper != trial.setting.taper:
                yield replace(trial, setting=replace(trial.setting, taper=taper))
    yield replace(trial, setting=replace(trial.setting, token_weight=3 - trial.setting.token_weight))
    for count in (trial.setting.count * 3 // 2, trial.setting.count * 3 // 4, trial.setting.count + pp):
        yield replace(trial, setting=replace(trial.setting, count=max(1, count)))
    for cut in cuts:
        if cut != trial.setting.cut:
            yield replace(trial, setting=replace(trial.setting, cut=cut))
