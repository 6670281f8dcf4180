"""The space that `slimpack` and `auto` search for one replica: a `Trial` is a point, `neighbours` are one step away.

cut          "symmetric" chain-free slices, "asymmetric" cuts of both directions, "whole" documents by LPT
num_packs    packs aimed at, before tapering
token_weight what a token's linear work counts when cutting: 2 evens out tokens, hence memory (λ of oracle §3)
taper        halvings of the first forward and of the last backward pack (`plan.pack_halving`)
order        "list", "list alternate": the memory-capped list schedule, backward or forward first after a backward;
             "word", "word inject": PackFlow's static word, catching up or injecting forwards
lookahead, split    of the list schedule (`schedule.packflow`)
"""

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Cut = Literal["symmetric", "asymmetric", "whole"]
Order = Literal["list", "list alternate", "word", "word inject"]

CUTS: tuple[Cut, ...] = ("symmetric", "asymmetric", "whole")
ORDERS: tuple[Order, ...] = ("list", "list alternate", "word", "word inject")
LOOKAHEADS: tuple[int | None, ...] = (None, 3, 0)
TAPERS = ((0, 0), (0, 1), (1, 1), (1, 2), (2, 3))
UNLIMITED_LOOKAHEAD = 2**31 - 1


class Setting(NamedTuple):
    """How packs are cut."""

    cut: Cut
    num_packs: int
    token_weight: int = 1
    taper: tuple[int, int] = (0, 0)


class Trial(NamedTuple):
    """Packs under one schedule."""

    setting: Setting
    order: Order = "list"
    lookahead: int | None = None
    split: bool = False

    def with_count(self, count: int) -> "Trial":
        """The same with another number of packs."""
        return self._replace(setting=self.setting._replace(num_packs=count))

    def describe(self) -> str:
        """For reports."""
        setting = self.setting
        parts = [
            f"{setting.cut} cuts" if setting.cut != "whole" else "whole documents",
            f"token weight {setting.token_weight}" if setting.token_weight != 1 else "",
            f"taper {setting.taper[0]}+{setting.taper[1]}" if setting.taper != (0, 0) else "",
            self.order,
            f"look-ahead {self.lookahead}" if self.lookahead is not None else "",
            "I and W" if self.split else "",
        ]
        return ", ".join(part for part in parts if part)


def trial_rows(trials: Sequence[Trial]) -> NDArray[np.int64]:
    """As the core reads them: cut, count, token weight, tapers, order, look-ahead, split; int64[trials, 8]."""
    rows = [
        (
            CUTS.index(trial.setting.cut),
            trial.setting.num_packs,
            trial.setting.token_weight,
            *trial.setting.taper,
            ORDERS.index(trial.order),
            UNLIMITED_LOOKAHEAD if trial.lookahead is None else trial.lookahead,
            int(trial.split),
        )
        for trial in trials
    ]
    return np.array(rows, np.int64).reshape(-1, 8)


def neighbours(trial: Trial, *, pp: int, cuts: tuple[Cut, ...], may_split: bool) -> Iterator[Trial]:
    """Trials that differ in one coordinate; the cheap ones, which keep the packs, first."""
    setting = trial.setting
    if pp > 1:
        yield trial._replace(order="list alternate" if trial.order == "list" else "list")
        for lookahead in LOOKAHEADS:
            if lookahead != trial.lookahead:
                yield trial._replace(lookahead=lookahead)
        if may_split:
            yield trial._replace(split=not trial.split)
        at = TAPERS.index(setting.taper)
        for taper in TAPERS[max(0, at - 1) : at + 2]:
            if taper != setting.taper:
                yield trial._replace(setting=setting._replace(taper=taper))
    yield trial._replace(setting=setting._replace(token_weight=3 - setting.token_weight))
    counts = (setting.num_packs * 3 // 2, setting.num_packs * 3 // 4, setting.num_packs + pp)
    for count in dict.fromkeys(max(1, count) for count in counts):
        if count != setting.num_packs:
            yield trial._replace(setting=setting._replace(num_packs=count))
    for cut in cuts:
        if cut != setting.cut:
            yield trial._replace(setting=setting._replace(cut=cut))
