"""Define the `[optimizer]` section (`OptimizerConfig`) and the learning rate of every step. Needs no torch."""

import math
from typing import Literal

from evenload.data.config import require_value
from evenload.errors import ConfigError, did_you_mean
from evenload.types.base import Frozen

Decay = Literal["constant", "cosine", "linear", "wsd"]
_NAMES = ("adamw", "muon")
_EIGHT_BITS = "for a smaller state set optimizer.moments = 'bfloat16' (6 bytes a weight instead of 12), or more dp; "
_MOST_DECAY = 0.99
"""A bfloat16 has 8 significant bits: a moment that one step changes by less than 2^-8 of it would stay where it is."""
_NORM_COMES_LATE = "the norm of all gradients is known when the first weights are updated already"
_DECAY_SHARE = 0.1
"""Of the steps of a run in which WSD decays by default (MiniCPM, Hu et al. 2024)."""


class OptimizerConfig(Frozen):
    """The optimizer, and the learning rate with warm-up and decay.

    Args:
        name: "adamw", fused; or "muon" for the matrices of layers, its updates as large as AdamW's, and AdamW for all
            other weights.
        learning_rate: after warm-up.
        beta1, beta2, eps: as in `torch.optim.AdamW`.
        momentum: of "muon", as in `torch.optim.Muon`.
        weight_decay: of matrices; norms and biases have none.
        clip_norm: global gradient norm limit; 0 = no clipping.
        moments: precision of AdamW's moments. "float32" (float64 for a float64 model); "bfloat16": half of it, and fp32
            weights are kept as the model's bfloat16 ones and 16 bits more, so that the state takes 6 bytes a weight
            instead of 12. With `model.dtype = "bfloat16"` and `beta1` and `beta2` of at most 0.99.
        in_backward: update every layer as soon as its gradients are complete, and use their memory for those of the
            layer before it: 4 bytes a weight of the largest unit (embedding, a layer, or the head) instead of all. With
            one pack a step and replica (`plan.strategy = "balanced"`, `plan.options.micro_batches = 1`), `clip_norm`
            0 and layouts of `dp` alone. Weights and moments are the same to the bit.
        warmup_steps: linear warm-up from 0.
        decay: what follows warm-up. "constant"; "cosine" or "linear" down to `final_ratio` of the learning rate at
            `train.steps`; "wsd": constant, and down to `final_ratio` in the last steps alone, so that a checkpoint of
            the constant part can go on with more `train.steps`.
        final_ratio: of the learning rate, where the decay ends.
        decay_steps: of "wsd": the last so many steps of the run decay; unset = a tenth of them.
        decay_shape: of "wsd": how it decays. "linear", "cosine", "sqrt" (1 - sqrt of the part that is done), or
            "exponential".
    """

    name: str = "adamw"
    learning_rate: float = 3e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    momentum: float = 0.95
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    moments: Literal["float32", "bfloat16"] = "float32"
    in_backward: bool = False
    warmup_steps: int = 0
    decay: Decay = "constant"
    final_ratio: float = 0.1
    decay_steps: int | None = None
    decay_shape: Literal["linear", "cosine", "sqrt", "exponential"] | None = None

    def __post_init__(self) -> None:
        if self.name not in _NAMES:
            why = _EIGHT_BITS if "8bit" in self.name.lower() else did_you_mean(self.name, _NAMES)
            raise ConfigError(f"optimizer.name is '{self.name}'; {why}choices: {', '.join(_NAMES)}")
        for field, is_right, what in (
            ("momentum", 0 <= self.momentum < 1, "from 0 to below 1"),
            ("learning_rate", self.learning_rate > 0, "above 0"),
            ("clip_norm", self.clip_norm >= 0, "0 or more"),
            ("clip_norm", not (self.in_backward and self.clip_norm), f"0 with in_backward: {_NORM_COMES_LATE}"),
            ("warmup_steps", self.warmup_steps >= 0, "0 or more"),
            ("final_ratio", 0 <= self.final_ratio <= 1, "from 0 to 1"),
            ("decay_steps", self.decay_steps is None or self.decay_steps >= 1, "at least 1"),
        ):
            require_value("optimizer", self, field, is_right, what)
        for field in ("beta1", "beta2") if self.moments == "bfloat16" else ():
            most = f'at most {_MOST_DECAY} with moments = "bfloat16", which is too coarse for slower averages'
            require_value("optimizer", self, field, getattr(self, field) <= _MOST_DECAY, most)
        for field in ("decay_steps", "decay_shape"):
            if getattr(self, field) is not None and self.decay != "wsd":
                raise ConfigError(
                    f"optimizer.{field} is {getattr(self, field)}, which optimizer.decay = '{self.decay}' does not "
                    f'read; set optimizer.decay = "wsd", or leave {field} out'
                )
        if self.decay_shape == "exponential" and not self.final_ratio:
            raise ConfigError(
                "optimizer.decay_shape is 'exponential' and optimizer.final_ratio 0, which it never reaches; set a "
                "final_ratio above 0, or another shape"
            )

    def _decaying_steps(self, total_steps: int) -> int:
        """Return in how many steps "wsd" decays."""
        return self.decay_steps or max(1, round(_DECAY_SHARE * total_steps))

    def require_steps(self, total_steps: int | None) -> None:
        """Raise `ConfigError` where the schedule does not fit into so many steps; None = it ends with its data."""
        if self.decay == "constant":
            return
        if total_steps is None:
            raise ConfigError(
                f"optimizer.decay is '{self.decay}', which ends at train.steps, but train.steps is not set"
            )
        if self.decay == "wsd" and self.warmup_steps + (decaying := self._decaying_steps(total_steps)) > total_steps:
            raise ConfigError(
                f"optimizer.warmup_steps {self.warmup_steps} and the {decaying} steps in which 'wsd' decays are more "
                f"than train.steps {total_steps}; lower one of them, or raise train.steps"
            )

    def rate(self, step: int, total_steps: int | None) -> float:
        """Return the learning rate of a step (from 0) in a run of `total_steps`; None = it ends with its data."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        if self.decay == "constant":
            return self.learning_rate
        assert total_steps is not None, "`require_steps` refuses it"
        shape, num_decaying = self.decay, total_steps - self.warmup_steps
        if self.decay == "wsd":
            shape, num_decaying = self.decay_shape or "linear", self._decaying_steps(total_steps)
        done = min(1.0, max(0.0, (step - (total_steps - num_decaying)) / max(1, num_decaying)))
        if shape == "exponential":
            return self.learning_rate * self.final_ratio**done
        shares = {"cosine": 0.5 * (1 + math.cos(math.pi * done)), "linear": 1 - done, "sqrt": 1 - math.sqrt(done)}
        return self.learning_rate * (self.final_ratio + (1 - self.final_ratio) * shares[shape])
