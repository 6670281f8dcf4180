"""`ProcessMemory`: main memory of a rank's process beside its tensors, and what the fullest is predicted to hold."""

import torch

from evenload.cost.process_memory import process_bytes
from evenload.runtime.device import forget_peak_process_bytes, resident_bytes
from evenload.types.model import ModelSpec
from evenload.types.plan import StepPlan


class ProcessMemory:
    """Of one rank."""

    def __init__(self, model: ModelSpec, device: torch.device) -> None:
        self._model, self._device = model, device
        self.fixed_bytes: int | None = None
        """Before the first step, beside weights, gradients and optimizer state: interpreter, libraries, process groups,
        loader. 0 where it is not known, or tensors are on a GPU; None = no step has begun."""
        self._predicted_bytes = 0

    def begin_step(self, static_bytes: int) -> None:
        """The peak is that of this step from now on.

        Args:
            static_bytes: weights, gradients and optimizer state.
        """
        if self.fixed_bytes is None:
            resident = None if self._device.type == "cuda" else resident_bytes()
            self.fixed_bytes = 0 if resident is None else max(0, resident - static_bytes)
        forget_peak_process_bytes(self._device)

    def predicted_bytes(self, plan: StepPlan, fixed_bytes: int | None) -> int | None:
        """What the fullest process holds by now, after this plan; None where that is not known.

        Args:
            fixed_bytes: of the rank that has most.
        """
        if not fixed_bytes:
            return None
        self._predicted_bytes = max(self._predicted_bytes, process_bytes(self._model, plan, fixed_bytes))
        return self._predicted_bytes
