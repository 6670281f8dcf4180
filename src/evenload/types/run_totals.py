"""`RunTotals`: what a run has trained and taken so far, over all of its starts."""

from time import time

from evenload.types.base import Frozen
from evenload.types.plan import StepPlan


class RunTotals(Frozen):
    """Of the steps that count: those that a resume trains again are counted once.

    Args:
        tokens: trained, without padding; label_tokens: of them, those with a loss.
        seconds: of training: steps, and what lies between them, such as waiting for data and checkpoints.
    """

    tokens: int = 0
    label_tokens: int = 0
    seconds: float = 0.0

    def after(self, plan: StepPlan, seconds: float, *, is_skipped: bool) -> "RunTotals":
        """With one more step, which took so long from the end of the one before; of one that was skipped because it was
        not finite nothing was trained."""
        tokens = 0 if is_skipped else sum(document.num_tokens for document in plan.documents)
        return RunTotals(
            tokens=self.tokens + tokens,
            label_tokens=self.label_tokens + (0 if is_skipped else plan.num_label_tokens),
            seconds=self.seconds + seconds,
        )

    def metrics(self) -> dict[str, int | float]:
        """Keys of a row of metrics, and the clock."""
        return {
            "total_tokens": self.tokens,
            "total_label_tokens": self.label_tokens,
            "elapsed_s": self.seconds,
            "unix_time_s": time(),
        }
