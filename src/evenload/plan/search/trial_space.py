"""The space that `slimpack` and `auto` search for one replica: a `Trial` is a point, `neighbours` are one step away.

cut          "symmetric" chain-free slices, "asymmetric" cuts of both directions, "whole" documents by LPT
num_packs    packs aimed at, before tapering
token_weight what a token's linear work counts when cutting: 2 evens out tokens, hence memory (λ)
taper        halvings of the first forward and of the last backward pack
order        "list", "list alternate": the memory-capped list schedule, backward or forward first after a backward;
             "static", "static inject": PackFlow's static order, catching up or injecting forwards; these four are
             known to the core. Any other registered schedule goes by its name, and is rated in Python
lookahead, split    of the list schedule (`schedule.packflow`); `split` is set, too, where a named schedule splits
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenload.plan.problem.options import CHOOSE
from evenload.schedule.packflow import LIST, LIST_SPLIT, STATIC, packflow_list, packflow_static
from evenload.schedule.registry import SCHEDULES
from evenload.schedule.schedule_rule import ScheduleRule

Cut = Literal["symmetric", "asymmetric", "whole"]

CUTS: tuple[Cut, ...] = ("symmetric", "asymmetric", "whole")
ORDERS = ("list", "list alternate", "static", "static inject")
LOOKAHEADS: tuple[int | None, ...] = (None, 3, 0)
TAPERS = ((0, 0), (0, 1), (1, 1), (1, 2), (2, 2), (2, 3))
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
    order: str = "list"
    lookahead: int | None = None
    split: bool = False

    @property
    def in_core(self) -> bool:
        """The core can rate it."""
        return self.order in ORDERS

    def rule(self) -> ScheduleRule:
        """The schedule, with the settings of the trial."""
        if not self.in_core:
            return SCHEDULES.named(self.order)
        if self.order.startswith(STATIC.name):
            inject = self.order != STATIC.name
            return replace(STATIC, order=lambda tasks, cap_bytes: packflow_static(tasks, inject=inject))
        alternate, lookahead, split = self.order != LIST.name, self.lookahead, self.split
        return replace(
            LIST_SPLIT if split else LIST,
            order=lambda tasks, cap_bytes: packflow_list(
                tasks, cap_bytes=cap_bytes, alternate=alternate, lookahead=lookahead, split=split
            ),
        )

    def with_count(self, count: int) -> "Trial":
        """The same with another number of packs."""
        return self._replace(setting=self.setting._replace(num_packs=count))

    def describe(self) -> str:
        setting = self.setting
        parts = [
            f"{setting.cut} cuts" if setting.cut != "whole" else "whole documents",
            f"token weight {setting.token_weight}" if setting.token_weight != 1 else "",
            f"taper {setting.taper[0]}+{setting.taper[1]}" if setting.taper != (0, 0) else "",
            self.order if self.in_core else "",
            f"look-ahead {self.lookahead}" if self.lookahead is not None else "",
            "I and W" if self.split else "",
        ]
        return ", ".join(part for part in parts if part)


def orders_of(schedule: str) -> tuple[str, ...]:
    """Orders of trials that run a schedule; all that the core knows where it may be chosen."""
    if schedule == CHOOSE:
        return ORDERS
    return tuple(order for order in ORDERS if order.split()[0] == schedule) or (schedule,)


def trial_under(setting: Setting, order: str) -> Trial:
    """Packs under an order of `orders_of`."""
    return Trial(setting, order, split=order not in ORDERS and SCHEDULES.named(order).splits_backward)


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


def neighbours(
    trial: Trial, *, pp: int, cuts: tuple[Cut, ...], may_split: bool, may_reorder: bool = True
) -> Iterator[Trial]:
    """Trials that differ in one coordinate; the cheap ones, which keep the packs, first.

    Args:
        may_split: backwards may run as I and W.
        may_reorder: other settings of the list schedule may be tried.
    """
    setting = trial.setting
    if pp > 1 and may_reorder:
        yield trial._replace(order="list alternate" if trial.order == "list" else "list")
        for lookahead in LOOKAHEADS:
            if lookahead != trial.lookahead:
                yield trial._replace(lookahead=lookahead)
        if may_split:
            yield trial._replace(split=not trial.split)
    if pp > 1:
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
