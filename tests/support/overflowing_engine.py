"""An engine with the interface of DeepSpeed's that leaves every other update out, as one does whose fp16 overflowed."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from engine_records import small_model
from evenload.integrations.deepspeed_loop import DeepSpeedLoop
from packed_cases import loader_of


class OverflowingEngine:
    """Trains the small Llama under "ZeRO-2" of one rank."""

    seq_dp_world_size, sequence_parallel_size = 1, 1
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.module = small_model()
        self.optimizer = SimpleNamespace(_coalesce_grad_reduction=None)
        self._calls = 0

    def __call__(self, **inputs: Any) -> Any:
        return self.module(**inputs)

    def zero_optimization_stage(self) -> int:
        return 2

    def gradient_accumulation_steps(self) -> int:
        return 1

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        pass

    def coalesce_grad_reduction(self) -> Any:
        return nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        self._calls += 1
        self.module.zero_grad()

    def was_step_applied(self) -> bool:
        return self._calls % 2 == 0


def updates_that_overflow(corpus: Path) -> list[tuple[int, bool]]:
    """Number and `was_updated` of every step up to the second update, as one rank."""
    loop = DeepSpeedLoop(OverflowingEngine(), loader_of(corpus))
    found = [(step.number, step.was_updated) for step in loop.train(2)]
    loop.loader.close()
    return found
