"""`Validation`: the losses of a run's validation data after a step, in all, by length class and by source."""

import math

from evenload.types.base import Frozen


class LossOf(Frozen):
    """The loss of some documents.

    Args:
        name: "256-511" of documents of so many tokens; the name of a part of the mixture.
        loss: mean over the tokens that have one; None where none has, or it is not finite.
    """

    name: str
    documents: int
    tokens: int
    label_tokens: int
    loss: float | None

    @property
    def perplexity(self) -> float | None:
        """exp(loss); None where there is none that a number can hold."""
        if self.loss is None:
            return None
        try:
            return math.exp(self.loss)
        except OverflowError:
            return None


class Validation(Frozen):
    """What one pass over the validation data found.

    Args:
        step: the last step that was trained before, as rows of metrics call it.
        whole: of all documents.
        by_length: by powers of two of their tokens, short ones first; classes without documents are left out.
        by_source: by part of the mixture; of one part where there is no mixture.
        seconds: that the pass took; training stood meanwhile.
        left_out: (reason, documents, tokens) of what was read and has no loss here, such as what `overlong` cut off.
        of_average: the weights were the moving average (`train.ema_decay`).
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
        """Of all documents."""
        return self.whole.loss

    @property
    def perplexity(self) -> float | None:
        """Of all documents."""
        return self.whole.perplexity

    def metrics(self) -> dict[str, float]:
        """What loggers show, by names that stay: "validation/loss", "validation/loss/length/256-511",
        "validation/loss/source/books", each with its perplexity; what does not exist is left out."""
        named = {"": self.whole}
        named |= {f"/length/{one.name}": one for one in self.by_length}
        named |= {f"/source/{one.name}": one for one in self.by_source if len(self.by_source) > 1}
        prefix = "validation_of_average" if self.of_average else "validation"
        found = {f"{prefix}/loss{name}": one.loss for name, one in named.items()}
        found |= {f"{prefix}/perplexity{name}": one.perplexity for name, one in named.items()}
        return {name: value for name, value in found.items() if value is not None}
