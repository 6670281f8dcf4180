"""Define what a run records: totals over its starts, losses of validation data, decisions about the layout;
and the profile of document lengths."""

import math
from time import time
from typing import Literal

from evenload.types.base import Frozen
from evenload.types.layout import ParallelLayout
from evenload.types.plan import StepPlan


class RunTotals(Frozen):
    """Totals of a run: tokens trained, without padding, those with a loss, and seconds of steps and between them; steps
    that a resume trains again count once."""

    tokens: int = 0
    label_tokens: int = 0
    seconds: float = 0.0

    def after(self, plan: StepPlan, seconds: float, *, is_skipped: bool) -> "RunTotals":
        """Return the totals after one more step, with its seconds since the end of the one before; a step that was
        skipped because it was not finite trained nothing."""
        tokens, labels = sum(document.num_tokens for document in plan.documents), plan.num_label_tokens
        if is_skipped:
            tokens = labels = 0
        return RunTotals(
            tokens=self.tokens + tokens, label_tokens=self.label_tokens + labels, seconds=self.seconds + seconds
        )

    def metrics(self) -> dict[str, int | float]:
        """Return keys of a row of metrics, with the time."""
        return {
            "total_tokens": self.tokens,
            "total_label_tokens": self.label_tokens,
            "elapsed_s": self.seconds,
            "unix_time_s": time(),
        }


class LossOf(Frozen):
    """The loss of some documents.

    Args:
        name: "256-511" of documents of so many tokens; the name of a part of the mixture.
        loss: mean over label tokens; None where there are none, or it is not finite.
    """

    name: str
    documents: int
    tokens: int
    label_tokens: int
    loss: float | None

    @property
    def perplexity(self) -> float | None:
        """exp(loss); None without a loss and where it overflows."""
        if self.loss is None:
            return None
        try:
            return math.exp(self.loss)
        except OverflowError:
            return None


class Validation(Frozen):
    """Losses of one pass over the validation data.

    Args:
        step: the last step that was trained before, as in rows of metrics.
        whole: of all documents.
        by_length: by powers of two of their tokens, ascending; classes without documents are left out.
        by_source: by part of the mixture; one where there is no mixture.
        seconds: that the pass took.
        left_out: (reason, documents, tokens) of what was read and has no loss, such as what `overlong` cut off.
        of_average: with the moving average of weights (`train.ema_decay`).
    """

    step: int
    whole: LossOf
    by_length: tuple[LossOf, ...]
    by_source: tuple[LossOf, ...]
    seconds: float
    left_out: tuple[tuple[str, int, int], ...] = ()
    of_average: bool = False

    @property
    def loss(self) -> float | None:
        """Mean loss of all documents."""
        return self.whole.loss

    @property
    def perplexity(self) -> float | None:
        """Perplexity of all documents."""
        return self.whole.perplexity

    def metrics(self) -> dict[str, float]:
        """Return "validation/loss", "validation/loss/length/256-511", "validation/loss/source/books" and so on for
        loggers, each with its perplexity; what does not exist is left out."""
        named = {"": self.whole}
        named |= {f"/length/{one.name}": one for one in self.by_length}
        named |= {f"/source/{one.name}": one for one in self.by_source if len(self.by_source) > 1}
        prefix = "validation_of_average" if self.of_average else "validation"
        values = {f"{prefix}/loss{name}": one.loss for name, one in named.items()}
        values |= {f"{prefix}/perplexity{name}": one.perplexity for name, one in named.items()}
        return {name: value for name, value in values.items() if value is not None}


SwitchKind = Literal["grow", "shrink", "move layers"]
"""To more stages on more ranks, to fewer, or layers and devices alone."""

LayoutAction = Literal["stay", "save memory", SwitchKind]


def switch_kind(before: ParallelLayout, after: ParallelLayout) -> SwitchKind:
    """Return the kind of a change of the layout."""
    if after.pp == before.pp:
        return "move layers"
    return "grow" if after.pp > before.pp else "shrink"


class LayoutDecision(Frozen):
    """A decision about the layout of a step.

    Seconds are predicted, over the known steps, the coming one first; None = the coming batch does not fit.

    Args:
        step: the coming one.
        layout: of the coming step; `before`: of the last one. As of `ParallelLayout.describe`.
        action: a switch grows the pipeline, shrinks it, or moves layers within the same depth.
        case: of FlexPipe's Fig. 7: 1 = the layout is kept as it is, 2 = kept by recomputing or offloading, 3 = switched
            because it does not fit, 4 = switched because another is faster.
        fits: condition A: the current layout holds the coming batch.
        switching_is_slower: condition B.
        fits_saving: condition C: it holds it with documents recomputed or offloaded.
        switching_is_slower_than_saving: condition D.
        is_patient: a switch would pay and was put off, because it has not paid often enough in a row.
        later_steps: a switch would pay and was put off, because it gains most after so many of the known steps, which
            `new_s` counts in the current layout; 0 = it was not.
        other: the best other layout that was planned; "" = none.
        known_steps: whose seconds are compared.
        keep_s: T(current); `save_s`: with a memory plan; `new_s`: T(other); `switch_s`: T(switch) to it.
        save_documents_s, save_layers_s: seconds of the coming step alone with either memory plan: documents that
            recompute or offload, or layers that recompute for all documents (FlexPipe's O_plan); None = it does not
            hold the batch, or none is needed.
        memory_plan: describes the memory plan with which the current layout would run; "" = none.
        why: one sentence.
        measured_switch_s, moved_bytes: of the switch, where a run made it.
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
        """Whether the layout changes before the step."""
        return self.case in (3, 4)

    @property
    def gain_s(self) -> float | None:
        """Seconds that the other layout saves over the known steps, less the switch; None where one does not fit."""
        staying_s = self.keep_s if self.keep_s is not None else self.save_s
        return None if staying_s is None or self.new_s is None else staying_s - self.new_s - self.switch_s


class LengthClass(Frozen):
    """Documents whose length is in `[start, stop)`, from a power of two to the next."""

    start: int
    stop: int
    documents: int
    tokens: int
    attention_pairs: int


class WindowCut(Frozen):
    """What a context window of `window` tokens would cut: documents longer than it with all their tokens, those after
    the first `window`, lost where they are truncated, and pairs of a query and a key in different pieces of `window`
    tokens, lost where they are split."""

    window: int
    longer_documents: int
    longer_tokens: int
    tokens_beyond: int
    attention_pairs_across: int


class HeaviestHalf(Frozen):
    """The longest documents that together hold at least half of something: how many, and the tokens of the shortest."""

    documents: int
    shortest: int


class LengthProfile(Frozen):
    """Describes a set of document lengths.

    Args:
        documents, tokens: totals; attention_pairs: causal pairs, n (n + 1) / 2 of a document of n tokens.
        shortest, median, mean, p90, p99, longest: tokens; a quantile q is the least length that at least q of the
            documents do not exceed.
        half_of_tokens, half_of_attention: the longest documents that hold half of it.
        classes: ascending and without gaps, from the first to the last with documents.
        windows: ascending.
    """

    documents: int
    tokens: int
    attention_pairs: int
    shortest: int
    median: int
    mean: float
    p90: int
    p99: int
    longest: int
    half_of_tokens: HeaviestHalf
    half_of_attention: HeaviestHalf
    classes: tuple[LengthClass, ...]
    windows: tuple[WindowCut, ...]
