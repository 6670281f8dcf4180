"""`LayoutDecision`: what a planner decided about the layout before one step, and from what (FlexPipe §5, Fig. 7)."""

from typing import Literal

from evenload.types.base import Frozen
from evenload.types.layout import ParallelLayout

SwitchKind = Literal["grow", "shrink", "move layers"]
"""Of a pipeline: to more stages on more ranks, to fewer, or layers and devices alone."""

LayoutAction = Literal["stay", "save memory", SwitchKind]


def switch_kind(before: ParallelLayout, after: ParallelLayout) -> SwitchKind:
    """What a change of the layout does."""
    if after.pp == before.pp:
        return "move layers"
    return "grow" if after.pp > before.pp else "shrink"


class LayoutDecision(Frozen):
    """One decision.

    Seconds are predicted and run over the known steps, the coming one first; None = the coming batch does not fit.

    Args:
        step: before which it was taken.
        layout: in which the step runs; `before`: in which the last one ran. As `ParallelLayout.describe` says them.
        action: what is done. A switch grows the pipeline, shrinks it, or moves layers within the same depth.
        case: of FlexPipe's Fig. 7: 1 = the layout is kept as it is, 2 = kept by recomputing or offloading, 3 = switched
            because it does not fit, 4 = switched because another is faster.
        fits: condition A: the current layout holds the coming batch.
        switching_is_slower: condition B.
        fits_saving: condition C: it holds it with documents recomputed or offloaded.
        switching_is_slower_than_saving: condition D.
        is_patient: a switch would pay and was put off, because it has not paid often enough in a row.
        later_steps: a switch would pay and was put off, because it gains most after so many of the known steps, which
            `new_s` counts as they are; 0 = it was not.
        other: the best other layout that was planned; "" = none holds the coming batch, or there is none.
        known_steps: whose seconds are compared.
        keep_s: T(current); `save_s`: with a memory plan; `new_s`: T(other); `switch_s`: T(switch) to it.
        save_documents_s, save_layers_s: seconds of the coming step alone with each memory plan: documents that
            recompute or offload, or layers that recompute for all of them (FlexPipe's O_plan); None = it does not hold
            the batch, or none is needed.
        memory_plan: the one with which the current layout would run, in words; "" = none.
        why: one sentence.
        measured_switch_s, moved_bytes: of the switch, in a run that made it; None = it was only predicted, or there was
            none.
    """

    step: int
    layout: str
    before: str
    action: LayoutAction
    case: Literal[1, 2, 3, 4]
    fits: bool
    switching_is_slower: bool
    fits_saving: bool
    switching_is_slower_than_saving: bool
    is_patient: bool = False
    later_steps: int = 0
    other: str = ""
    known_steps: int = 1
    keep_s: float | None = None
    save_s: float | None = None
    save_documents_s: float | None = None
    save_layers_s: float | None = None
    memory_plan: str = ""
    new_s: float | None = None
    switch_s: float = 0.0
    why: str = ""
    measured_switch_s: float | None = None
    moved_bytes: int | None = None

    @property
    def is_switch(self) -> bool:
        """The layout changes before the step."""
        return self.case in (3, 4)

    @property
    def gain_s(self) -> float | None:
        """Predicted to be won over the known steps by what another layout would do, its switch paid; None where either
        side does not fit."""
        staying_s = self.keep_s if self.keep_s is not None else self.save_s
        if staying_s is None or self.new_s is None:
            return None
        return staying_s - self.new_s - self.switch_s
