"""FlexPipe's decision between two steps: keep the layout, save memory in it, or switch (§5, FMOP; Alg. 1 lines 28-37).

    A   the current layout holds the coming batch                 T(current) is infinite where it does not
    B   switching does not pay: T(new) + T(switch) >= T(current)
    C   it holds the batch when documents are recomputed or offloaded
    D   switching does not beat that: T(new) + T(switch) >= T(current) + T_rc + T_swap

    A and B             stay
    not A and C and D   stay, with the memory plan
    otherwise           switch (the printed condition E leaves out "not A, not C, D")

Ours on top is hysteresis: a switch that nothing forces must gain `margin` of the time without it, and, but for the
first one, have paid at `patience_steps` steps in a row. With margin 0 and patience 1 the decision is the published one.

T of all conditions runs over the steps whose lengths are known. Where a switch gains more some of these steps later, it
is made then; the steps it waits count for patience.
"""

import math
from dataclasses import dataclass
from typing import Literal

from evenload.plan.layouts.layout_plans import MemoryPlans
from evenload.plan.strategies.flexpipe import FlexOptions
from evenload.types.base import Frozen
from evenload.types.layout import ParallelLayout
from evenload.types.run import LayoutAction, LayoutDecision, switch_kind

Action = Literal["stay", "save memory", "switch"]
_PREDICTED = "{} holds the batch as predicted; by measured memory no layout does"


class FlexState(Frozen):
    """Between two steps: the layout of the step before, the step before which it last changed (None = never), and how
    many latest steps in a row a switch would have paid at, then or later, without one."""

    layout: ParallelLayout
    switched_at: int | None = None
    paying_steps: int = 0


@dataclass(frozen=True)
class Outlook:
    """Seconds of the known steps; infinite where the coming batch does not fit.

    Args:
        keep_s, save_s: T(current) without, and with a memory plan for the coming step.
        new_s, switch_s: T(new) of the best other mapping, and T(switch).
        later_steps: after so many of the known steps a switch gains most; 0 = before the coming one.
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
    if switched_to is not None:
        return FlexState(layout=switched_to, switched_at=step)
    paying_steps = state.paying_steps + 1 if decision.is_put_off else 0
    return FlexState(layout=state.layout, switched_at=state.switched_at, paying_steps=paying_steps)


def layout_decision(
    step: int,
    decision: Decision,
    outlook: Outlook,
    *,
    before: ParallelLayout,
    after: ParallelLayout,
    other: ParallelLayout | None,
    patience: tuple[int, int],
    fits_by_prediction: bool,
    memory_plans: MemoryPlans,
) -> LayoutDecision:
    """What was decided before a step.

    Args:
        other: the best other layout that holds the coming batch; None = none does.
        patience: steps in a row at which a switch has paid, this one included, and how many it takes.
        fits_by_prediction: the plan of the step fits as predicted, whatever measured steps say of memory.
        memory_plans: of the current layout for the coming step.
    """
    has_switched = after != before
    action: LayoutAction = "save memory" if decision.action == "save memory" else "stay"
    if has_switched:
        action = switch_kind(before, after)
    return LayoutDecision(
        step=step,
        layout=after.describe(),
        before=before.describe(),
        action=action,
        case=(4 if decision.fits else 3) if has_switched else 2 if action == "save memory" else 1,
        fits=decision.fits,
        switching_is_slower=decision.switching_is_slower,
        fits_saving=decision.fits_saving,
        switching_is_slower_than_saving=decision.switching_is_slower_than_saving,
        is_patient=decision.is_patient,
        later_steps=decision.later_steps,
        other="" if other is None else other.describe(),
        known_steps=outlook.known_steps,
        keep_s=_known(outlook.keep_s),
        save_s=_known(outlook.save_s),
        save_documents_s=memory_plans.documents_s,
        save_layers_s=memory_plans.layers_s,
        memory_plan=_memory_plan(memory_plans),
        new_s=_known(outlook.new_s),
        switch_s=outlook.switch_s,
        why=_why(step, decision, outlook, (before, memory_plans), other, has_switched=has_switched, patience=patience)
        or (_PREDICTED.format(after.describe()) if fits_by_prediction else "no layout holds the batch"),
    )


def _memory_plan(plans: MemoryPlans) -> str:
    """How the current layout holds the batch where it cannot store everything; "" where it can, or nothing helps."""
    if plans.is_stored or not plans.chosen.feasible:
        return ""
    again = plans.chosen.plan.layout.recomputed_counts
    if any(again):
        return f"recomputing {'+'.join(map(str, again))} layers of its stages"
    names = sorted({policy for packs in plans.chosen.plan.pack_plans for policy in packs.policies.values()})
    said = {"recompute": "recomputing", "offload": "offloading"}
    return f"{' and '.join(said[name] for name in names)} documents"


def _known(seconds: float) -> float | None:
    return seconds if math.isfinite(seconds) else None


def _why(
    step: int,
    decision: Decision,
    outlook: Outlook,
    current: tuple[ParallelLayout, MemoryPlans],
    other: ParallelLayout | None,
    *,
    has_switched: bool,
    patience: tuple[int, int],
) -> str:
    """One sentence; "" where no layout has room by what is known."""
    here = current[0].describe()
    staying = f"{here} holds the batch"
    if not decision.fits:
        saved_by = _memory_plan(current[1]) or "recomputing or offloading"
        staying = f"{here} holds the batch by {saved_by}" if decision.fits_saving else ""
    if other is None:
        return f"{staying}; no other layout does" if staying else ""
    if not staying:
        return f"{here} does not hold the batch, not even by recomputing or offloading"
    staying_s = outlook.keep_s if decision.fits else outlook.save_s
    share = (outlook.new_s + outlook.switch_s) / staying_s - 1
    faster = f"{other.describe()} with the switch takes {100 * abs(share):.1f} % {'less' if share < 0 else 'more'} time"
    if has_switched:
        return f"{faster} than {here}{'' if decision.fits else ' with a memory plan'}"
    if decision.later_steps:
        return f"{staying}; {faster}, gaining most from step {step + decision.later_steps} on"
    if decision.is_patient:
        return f"{staying}; {faster}, for {patience[0]} of {patience[1]} steps in a row now"
    return f"{staying}; {faster}{', within the margin' if share < 0 else ''}"
