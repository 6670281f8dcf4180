"""Hold what is predicted of recorded steps: as a run divided their documents, and as `evenload.micro_batches` does."""

from typing import Literal

from evenload.types.base import Frozen

Waits = Literal["micro_batch", "step"]
"""Where ranks wait for each other: at every micro-batch (FSDP, ZeRO-3), or once a step (DDP, ZeRO-1)."""


class Division(Frozen):
    """Predicts a step whose documents are divided into micro-batches, or the mean of several: seconds until the last
    rank is done, those of them that the mean rank waits, and micro-batches of the rank with most."""

    step_s: float
    waiting_s: float
    micro_batches: float

    @property
    def waiting_share(self) -> float:
        """Return the share of the step that ranks wait."""
        return self.waiting_s / self.step_s


class Judged(Frozen):
    """Holds a step, or the mean of several, as the run divided it (None = not recorded) and as `micro_batches` does;
    and seconds that no division within the token limit goes below."""

    theirs: Division | None
    ours: Division
    bound_s: float

    @property
    def divisions(self) -> list[tuple[str, Division]]:
        """Return the names of both and what is predicted of them, those recorded first."""
        return [(name, one) for name, one in (("this partition", self.theirs), ("ours", self.ours)) if one]

    @property
    def recorded(self) -> Division:
        """Return the run's division, ours where it is not known."""
        return self.divisions[0][1]


class JudgedStep(Judged):
    """Holds one step; `step` is its line in the file."""

    step: int
    documents: int
    tokens: int


class JudgedSteps(Judged):
    """Holds the steps of a file with their means, and in how many the run's micro-batches break the token limit."""

    steps_beyond_limit: int
    steps: tuple[JudgedStep, ...]
