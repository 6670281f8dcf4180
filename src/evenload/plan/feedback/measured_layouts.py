"""`MeasuredLayouts`: what trained steps and switches say about layouts: measured over predicted seconds.

A layout that runs slower than predicted beside others is worth less than its plans say; a switch that takes longer
than predicted must win more, one of its kind (what makes a pipeline shallower mostly copies weights, what makes it
deeper takes what every switch takes); and where steps hold more than predicted, a layout needs room for that. All are
kept as the last few ratios, of which the median counts, so that one disturbed step says nothing. Layouts that never
ran take what all others have in common (a slow machine is slow in every layout), and what is known of a layout fades
towards that while it does not run, so that nothing is held against it for ever.

Small, frozen and serialisable: it travels in checkpoints, and the same values give the same decisions.
"""

import statistics

import msgspec

from evenload.types.base import Frozen
from evenload.types.layout import ParallelLayout
from evenload.types.layout_decision import SwitchKind

KEPT_RATIOS = 5
"""Newest of a layout, and of a kind of switch."""
FADE = 31 / 32
"""Of what is special to a layout, left after every step that runs in another."""


class LayoutRatios(Frozen):
    """Measured over predicted step times of one layout.

    Args:
        layout: generation 0.
        ratios: newest last.
        last_step: that was measured.
    """

    layout: ParallelLayout
    ratios: tuple[float, ...]
    last_step: int


class SwitchRatios(Frozen):
    """Measured over predicted seconds of switches of one kind, newest last."""

    kind: SwitchKind
    ratios: tuple[float, ...]


class MeasuredLayouts(Frozen):
    """Everything known at one step.

    Args:
        layouts: that ran, in the order in which they first did.
        switches: kinds that were made, in the order in which they first were.
        memory_ratios: measured over predicted peak bytes of steps in any layout, newest last.
    """

    layouts: tuple[LayoutRatios, ...] = ()
    switches: tuple[SwitchRatios, ...] = ()
    memory_ratios: tuple[float, ...] = ()

    def with_step(self, step: int, layout: ParallelLayout, ratio: float) -> "MeasuredLayouts":
        """Known after a step in a layout."""
        key = layout.arrangement
        before = next((one.ratios for one in self.layouts if one.layout == key), ())
        newest = LayoutRatios(layout=key, ratios=(*before, ratio)[-KEPT_RATIOS:], last_step=step)
        if before:
            layouts = tuple(newest if one.layout == key else one for one in self.layouts)
        else:
            layouts = (*self.layouts, newest)
        return msgspec.structs.replace(self, layouts=layouts)

    def with_switch(self, kind: SwitchKind, ratio: float) -> "MeasuredLayouts":
        """Known after a switch."""
        kept = {one.kind: one.ratios for one in self.switches}
        kept[kind] = (*kept.get(kind, ()), ratio)[-KEPT_RATIOS:]
        switches = tuple(SwitchRatios(kind=one, ratios=ratios) for one, ratios in kept.items())
        return msgspec.structs.replace(self, switches=switches)

    def with_peak(self, ratio: float) -> "MeasuredLayouts":
        """Known after a step whose memory was measured."""
        return msgspec.structs.replace(self, memory_ratios=(*self.memory_ratios, ratio)[-KEPT_RATIOS:])

    def factor(self, layout: ParallelLayout, step: int) -> float:
        """By which predicted step times of a layout are to be multiplied at a step; 1 while nothing is known."""
        if not self.layouts:
            return 1.0
        common = statistics.median(statistics.median(one.ratios) for one in self.layouts)
        key = layout.arrangement
        own = next((one for one in self.layouts if one.layout == key), None)
        if own is None:
            return common
        weight = FADE ** max(0, step - 1 - own.last_step)
        return common + (statistics.median(own.ratios) - common) * weight

    def switch_factor(self, kind: SwitchKind) -> float:
        """The same of predicted seconds of a switch; 1 where none of its kind was made."""
        ratios = next((one.ratios for one in self.switches if one.kind == kind), ())
        return statistics.median(ratios) if ratios else 1.0

    def memory_factor(self) -> float:
        """The same of predicted bytes, and never below 1: room that a measurement did not use is not given away."""
        return max(1.0, statistics.median(self.memory_ratios)) if self.memory_ratios else 1.0
