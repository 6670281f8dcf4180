"""FlexPipe's decision between two steps: keep the layout, save memory in it, or switch (§5, FMOP; Alg. 1 lines 28-37).

    A   the current layout holds the coming batch                 T(current) is infinite where it does not
    B   switching does not pay: T(new) + T(switch) >= T(current)
    C   it holds the batch when documents are recomputed or offloaded
    D   switching does not beat that: T(new) + T(switch) >= T(current) + T_rc + T_swap

    A and B             stay
    not A and C and D   stay, with the memory plan
    otherwise           switch: A and not B; not A and (not C or not D)

The printed condition E leaves out "not A, not C, D", line 36 says "else if not D", and "A false implies B false" holds
only if a step beyond memory takes for ever: hence the infinity and the "otherwise".

Ours on top is hysteresis: a switch that nothing forces must gain `margin` of the time without it, and must have paid at
`patience_steps` steps in a row, so that batches that alternate do not move the model back and forth. Until the first
switch patience is not asked for: the layout in which a run starts was nobody's answer to its batches. With margin 0 and
patience 1 the decision is the published one.

T of all conditions runs over the steps whose lengths are known. Where a switch gains more some of these steps later,
because the coming ones are faster as they are, it is made then; the steps it waits count for patience, because it has
been in view all the while.
"""

import math
from dataclasses import dataclass
from typing import Literal

from evenload.plan.strategies.flexpipe import FlexOptions
from evenload.types.base import Frozen
from evenload.types.layout import ParallelLayout

Action = Literal["stay", "save memory", "switch"]


class FlexState(Frozen):
    """Everything between two steps; small and serialisable.

    Args:
        layout: of the step before; at first, the one in which the run starts.
        switched_at: the step before which the layout changed last; None = never.
        paying_steps: latest steps in a row at which a switch would have paid, then or later, none of which switched.
    """

    layout: ParallelLayout
    switched_at: int | None = None
    paying_steps: int = 0


@dataclass(frozen=True)
class Outlook:
    """Seconds of the known steps; infinite where the coming batch does not fit.

    Args:
        keep_s: T(current), without a memory plan for the coming step.
        save_s: T(current) + T_rc + T_swap: with one.
        new_s: T(new) of the best other mapping.
        switch_s: T(switch).
        later_steps: after so many of the known steps a switch gains most; 0 = before the coming one.
        known_steps: whose seconds these are.
    """

    keep_s: float
    save_s: float
    new_s: float
    switch_s: float
    later_steps: int = 0
    known_steps: int = 1


@dataclass(frozen=True)
class Decision:
    """What to do before a step, and the conditions it follows from."""

    action: Action
    fits: bool
    switching_is_slower: bool
    fits_saving: bool
    switching_is_slower_than_saving: bool
    is_patient: bool = False
    later_steps: int = 0

    @property
    def is_put_off(self) -> bool:
        """A switch would pay, and is not made before this step."""
        return self.is_patient or self.later_steps > 0


def decide(outlook: Outlook, state: FlexState, options: FlexOptions) -> Decision:
    """Weigh the conditions before a step."""
    switched_s = outlook.new_s + outlook.switch_s
    fits, fits_saving = math.isfinite(outlook.keep_s), math.isfinite(outlook.save_s)
    slower = switched_s >= outlook.keep_s * (1 - options.margin)
    slower_than_saving = switched_s >= outlook.save_s * (1 - options.margin)
    action: Action = "switch"
    if fits and slower:
        action = "stay"
    elif not fits and fits_saving and slower_than_saving:
        action = "save memory"
    later_steps, patient = 0, False
    if action == "switch" and (fits or fits_saving):
        later_steps = outlook.later_steps
        patient = state.switched_at is not None and state.paying_steps + 1 < options.patience_steps
    if later_steps or patient:
        action = "stay" if fits else "save memory"
    return Decision(action, fits, slower, fits_saving, slower_than_saving, patient and not later_steps, later_steps)


def state_after(decision: Decision, step: int, state: FlexState, switched_to: ParallelLayout | None) -> FlexState:
    """For the next step.

    Args:
        step: the one decided on.
        switched_to: the new layout; None = it stayed.
    """
    if switched_to is not None:
        return FlexState(layout=switched_to, switched_at=step)
    paying_steps = state.paying_steps + 1 if decision.is_put_off else 0
    return FlexState(layout=state.layout, switched_at=state.switched_at, paying_steps=paying_steps)
