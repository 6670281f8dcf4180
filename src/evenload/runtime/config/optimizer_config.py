"""`OptimizerConfig`: the `[optimizer]` section, and the learning rate of every step. Needs no torch."""

import math
from typing import Literal

from evenload.errors import ConfigError
from evenload.types.base import Frozen


class OptimizerConfig(Frozen):
    """AdamW with warm-up and decay.

    Args:
        learning_rate: after warm-up.
        beta1, beta2, eps: as in `torch.optim.AdamW`.
        weight_decay: of matrices; norms and biases have none.
        clip_norm: global gradient norm limit; 0 = no clipping.
        warmup_steps: linear warm-up from 0.
        decay: "constant", or "cosine" down to `final_ratio` of the learning rate at `train.steps`.
        final_ratio: of the learning rate, where the cosine ends.
    """

    learning_rate: float = 3e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    warmup_steps: int = 0
    decay: Literal["constant", "cosine"] = "constant"
    final_ratio: float = 0.1

    def __post_init__(self) -> None:
        if self.learning_rate <= 0:
            raise ConfigError(f"optimizer.learning_rate is {self.learning_rate}, must be above 0")
        if self.clip_norm < 0 or self.warmup_steps < 0:
            raise ConfigError("optimizer.clip_norm and optimizer.warmup_steps must be 0 or more")

    def rate(self, step: int, total_steps: int) -> float:
        """Learning rate of a step (from 0) in a run of `total_steps`."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        if self.decay == "constant":
            return self.learning_rate
        progress = (step - self.warmup_steps) / max(1, total_steps - self.warmup_steps)
        share = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        return self.learning_rate * (self.final_ratio + (1 - self.final_ratio) * share)
