"""What the checks that compute run on: the user's model, shortened where it is large, and a small part of the data.

Isolation, invariance and resume do not depend on how many layers there are or how many documents a batch holds, so a
minute is enough: the model keeps its first layers (with its own weights), a step has a few documents, long ones are
cut, and two replicas stand for all. Everything that was made smaller is said in `notes`. Ledger and memory look at the
user's own batches and model.
"""

from dataclasses import dataclass

from evenload.runtime.config.train_config import TrainConfig

STEPS = 5
"""Steps of the run that is resumed."""


@dataclass(frozen=True, kw_only=True)
class Scope:
    """The settings of a smaller run of the same kind, and what is smaller than in the user's."""

    config: TrainConfig
    notes: tuple[str, ...]
