"""A decision as reports tell it: the conditions, the seconds that they compare, and one sentence why."""

import math

from evenload.plan.reconfiguration.fmop import Decision, Outlook
from evenload.plan.reconfiguration.layout_plans import MemoryPlans
from evenload.types.layout import ParallelLayout
from evenload.types.layout_decision import LayoutAction, LayoutDecision, switch_kind


def told_decision(
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
        before, after: the layouts of the step before and of the step.
        other: the best other layout that holds the coming batch; None = none does.
        patience: steps in a row at which a switch has paid, this one included, and how many it takes.
        memory_plans: of the current layout for the coming step.
        fits_by_prediction: the plan of the step fits as predicted, whatever measured steps say of memory.
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


_PREDICTED = "{} holds the batch as predicted; by measured memory no layout does"


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
