"""Decide between two steps to keep the layout, save memory in it, or switch (FlexPipe §5, FMOP; Alg. 1 lines 28-37).

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
from dataclasses import asdict, dataclass
from typing import Any, Literal

from evenload.planning.layouts.layout_plans import LayoutOutcome, MemoryPlans
from evenload.planning.strategies.flexpipe import FlexOptions
from evenload.types.base import Frozen
from evenload.types.layout import ParallelLayout
from evenload.types.run import LayoutAction, LayoutDecision, switch_kind

Action = Literal["stay", "save memory", "switch"]
_PREDICTED = "{} holds the batch as predicted; by measured memory no layout does"


class FlexState(Frozen):
    """Hold between two steps the layout, the step before which it last changed (None = never), and how many latest
    steps in a row a switch would have paid at, then or later, without one."""

    layout: ParallelLayout
    switched_at: int | None = None
    paying_steps: int = 0


@dataclass(frozen=True)
class Outlook:
    """Hold the seconds of the known steps, infinite where the coming batch does not fit: T(current) without and with a
    memory plan for the coming step, T(new) of the best other mapping, and T(switch), which gains most after
    `later_steps` of them."""

    keep_s: float
    save_s: float
    new_s: float
    switch_s: float
    later_steps: int = 0
    known_steps: int = 1


@dataclass(frozen=True)
class Decision:
    """Hold what to do before a step, and the conditions it follows from."""

    action: Action
    fits: bool
    switching_is_slower: bool
    fits_saving: bool
    switching_is_slower_than_saving: bool
    is_patient: bool = False
    later_steps: int = 0


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
    would_pay = decision.is_patient or decision.later_steps > 0
    paying_steps = state.paying_steps + 1 if would_pay else 0
    return FlexState(layout=state.layout, switched_at=state.switched_at, paying_steps=paying_steps)


def layout_decision(
    step: int,
    decision: Decision,
    outlook: Outlook,
    keep: LayoutOutcome,
    target: LayoutOutcome | None,
    *,
    patience: tuple[int, int],
    fits_by_prediction: bool,
) -> LayoutDecision:
    """Record what was decided before a step about `keep`, the current layout, and `target`, the best other one that
    holds the coming batch. `patience`: steps in a row at which a switch has paid, with this one, and how many it takes;
    `fits_by_prediction`: the plan of the step fits, whatever measured steps say of memory."""
    before = after = keep.layout
    saves = decision.action == "save memory"
    action: LayoutAction = "save memory" if saves else "stay"
    case = 2 if saves else 1
    if decision.action == "switch" and target is not None:
        after, case = target.layout, 4 if decision.fits else 3
        action = switch_kind(before, after)
    conditions: dict[str, Any] = asdict(decision) | {"action": action}
    unknown = _PREDICTED.format(after.describe()) if fits_by_prediction else "no layout holds the batch"
    return LayoutDecision(
        step=step,
        layout=after.describe(),
        before=before.describe(),
        case=case,
        **conditions,
        other="" if target is None else target.layout.describe(),
        known_steps=outlook.known_steps,
        keep_s=_known(outlook.keep_s),
        save_s=_known(outlook.save_s),
        save_documents_s=keep.plans.documents_s,
        save_layers_s=keep.plans.layers_s,
        memory_plan=_memory_plan(keep.plans),
        new_s=_known(outlook.new_s),
        switch_s=outlook.switch_s,
        why=_why(step, decision, outlook, keep, target, patience=patience, has_switched=case > 2) or unknown,
    )


def _memory_plan(plans: MemoryPlans) -> str:
    """Name how the current layout holds a batch that it cannot store; "" where it can, or nothing helps."""
    if plans.is_stored or not plans.chosen.feasible:
        return ""
    again = plans.chosen.plan.layout.recomputed_counts
    if any(again):
        return f"recomputing {'+'.join(map(str, again))} layers of its stages"
    names = sorted({policy for packs in plans.chosen.plan.pack_plans for policy in packs.policies.values()})
    verbs = {"recompute": "recomputing", "offload": "offloading"}
    return f"{' and '.join(verbs[name] for name in names)} documents"


def _known(seconds: float) -> float | None:
    return seconds if math.isfinite(seconds) else None


def _why(
    step: int,
    decision: Decision,
    outlook: Outlook,
    keep: LayoutOutcome,
    target: LayoutOutcome | None,
    *,
    patience: tuple[int, int],
    has_switched: bool,
) -> str:
    """Explain the decision in one sentence; "" where no layout is known to hold the batch."""
    here = keep.layout.describe()
    staying = f"{here} holds the batch"
    if not decision.fits:
        saved_by = _memory_plan(keep.plans) or "recomputing or offloading"
        staying = f"{here} holds the batch by {saved_by}" if decision.fits_saving else ""
    if target is None:
        return f"{staying}; no other layout does" if staying else ""
    if not staying:
        return f"{here} does not hold the batch, not even by recomputing or offloading"
    staying_s = outlook.keep_s if decision.fits else outlook.save_s
    share = (outlook.new_s + outlook.switch_s) / staying_s - 1
    less = "less" if share < 0 else "more"
    faster = f"{target.layout.describe()} with the switch takes {100 * abs(share):.1f} % {less} time"
    if has_switched:
        return f"{faster} than {here}{'' if decision.fits else ' with a memory plan'}"
    if decision.later_steps:
        return f"{staying}; {faster}, gaining most from step {step + decision.later_steps} on"
    if decision.is_patient:
        return f"{staying}; {faster}, for {patience[0]} of {patience[1]} steps in a row now"
    return f"{staying}; {faster}{', within the margin' if share < 0 else ''}"
