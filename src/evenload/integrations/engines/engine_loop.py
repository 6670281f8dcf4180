"""`EngineLoop`: optimizer steps of an engine, one from each step of a `PackedLoader`; what such loops have in common.

    for trained in loop.train(1000):
        print(trained.number, trained.loss.item())

A global batch becomes one update with the gradient of its documents one by one, so neither ranks nor packs nor the
strategy change what is trained. The loader's place is part of every checkpoint: training goes on at the next document,
also with another number of ranks.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from evenload.errors import ConfigError
from evenload.integrations.engines.pack_loss import PackLoss, hf_pack_loss
from evenload.integrations.model_balance import balance_for_model
from evenload.integrations.packed_loader import PackedLoader
from evenload.integrations.packed_step import PackedStep
from evenload.plan.strategies.registry import whole_strategies


class TrainedStep(NamedTuple):
    """One update.

    Args:
        number: of updates made, from 1, counted over resumes.
        loss: float[], on the device: mean over the label tokens of the global batch, before the update.
        num_label_tokens: of the global batch.
        num_micro_batches: that this rank ran, those without work included.
        was_updated: False where the engine left the update out, because gradients overflowed in fp16; `number` is then
            that of the step before, once more.
    """

    number: int
    loss: torch.Tensor
    num_label_tokens: int
    num_micro_batches: int
    was_updated: bool


class EngineLoop(ABC):
    """Base of the loops; a subclass says how gradients are summed and applied, and how checkpoints are written.

    Args:
        model: that is trained; packs are balanced for its `config` where the loader was made without a model.
        loader: of this rank; whole documents, `format="hf"` unless `loss` is given.
        loss: of one micro-batch; default: `hf_pack_loss`.
        engine: its name, for messages; sequence_ranks: of its groups that share every pack.

    Attributes:
        loader: as given.
        num_steps: updates made, over resumes.

    Raises:
        ConfigError: a loader from which the engine would train something else, or would wait for ever.
    """

    def __init__(
        self, model: Any, loader: PackedLoader, loss: PackLoss | None, *, engine: str, sequence_ranks: int = 1
    ) -> None:
        _refuse_loader(loader, loss, engine, sequence_ranks)
        balance_for_model(loader, model)
        self.loader, self._engine_name = loader, engine
        self._loss: PackLoss = loss or hf_pack_loss
        self.num_steps = 0

    @abstractmethod
    def accumulate(self, step: PackedStep) -> torch.Tensor:
        """Forward and backward of one global batch. Collective.

        Returns:
            The loss of the global batch, float[]; its gradients are where the engine's optimizer takes them from.
        """

    @abstractmethod
    def update(self) -> bool:
        """Apply the gradients, and forget them; whether that was done. Collective."""

    def train(self, num_steps: int) -> Iterator[TrainedStep]:
        """Update until `num_steps` updates were made, over resumes and epochs, or the loader's epochs end. Collective.

        A checkpoint saved in the loop's body is that after the update.
        """
        while self.num_steps < num_steps and not self.loader.has_ended:
            for step in self.loader.steps():
                loss = self.accumulate(step)
                was_updated = self.update()
                self.num_steps += was_updated
                # A rank without documents runs one without work.
                num_micro_batches = max(1, len(step))
                yield TrainedStep(self.num_steps, loss, step.num_label_tokens, num_micro_batches, was_updated)
                if self.num_steps >= num_steps:
                    break

    def _require_equal_counts(self, reason: str) -> None:
        options = self.loader.options
        if self.loader.world_size > 1 and options.micro_batches is None and not options.equal_micro_batches:
            raise ConfigError(
                f"equal_micro_batches is off, but {self._engine_name} {reason}, so the ranks would wait for one with "
                "fewer micro-batches without end; leave it on (ranks short of work run packs without a loss)"
            )


def sum_over_ranks(value: torch.Tensor) -> torch.Tensor:
    """The sum over all processes; alone, the value itself."""
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(value)
    return value


def _refuse_loader(loader: PackedLoader, loss: PackLoss | None, engine: str, sequence_ranks: int) -> None:
    options = loader.options
    if options.evaluation:
        raise ConfigError(f"{engine} trains, and the loader was made with evaluation=True; make another one without it")
    if not options.keeps_whole:
        whole = ", ".join(whole_strategies())
        raise ConfigError(
            f"strategy '{options.strategy}' cuts documents, and {engine} runs whole micro-batches both ways, "
            f"so keys of earlier slices would be missing. Choose one of {whole}, or train with 'evenload train'"
        )
    if loss is None and options.format != "hf":
        raise ConfigError(
            f'the loader has format "{options.format}", the loop\'s own loss reads "hf"; make it with format="hf", or '
            "give loss=function(model, batch)"
        )
    shared = options.sequence_ranks
    if shared != sequence_ranks:
        raise ConfigError(
            f"the loader's sequence_ranks is {shared}, and {engine} has sequence groups of {sequence_ranks} here; give "
            "both the same number: on DeepSpeed mpu = share_sequences(model, ranks), "
            "deepspeed.initialize(..., mpu=mpu) and PackedLoader(sequence_ranks=ranks); other loops share no sequences"
        )
    is_alone = not (dist.is_available() and dist.is_initialized())
    rank, world_size = (0, 1) if is_alone else (dist.get_rank(), dist.get_world_size())
    if (loader.rank, loader.world_size * shared) != (rank // shared, world_size):
        raise ConfigError(
            f"the loader is rank {loader.rank} of {loader.world_size}, torch.distributed has {rank} of {world_size}"
            + (f", {shared} of which share sequences" if shared > 1 else "")
            + "; make the loader after the process group, without rank, world_size and group. Tensor, context, expert "
            f"and pipeline parallel ranks are not tested with {engine}"
        )
