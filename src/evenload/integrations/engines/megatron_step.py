"""`MegatronTrainStep`: optimizer steps of Megatron-Core on the packs of a `PackedLoader`.

    train_step = MegatronTrainStep(model, optimizer, loader)
    for step in loader.steps():
        report = train_step(step)

Megatron-Core takes everything that a plan of whole documents needs: the number of micro-batches of *this* call
(`num_microbatches`), which may differ from replica to replica, since 1F1B of one replica never waits for another;
lengths that differ from micro-batch to micro-batch (`variable_seq_lengths`: neighbours tell each other the shape of
what follows); documents inside a pack (`PackedSeqParams`); and a loss that is a sum, which `finalize_model_grads`
divides by the label tokens of all replicas and micro-batches (`calculate_per_token_loss`). So loss and gradient are
those of the documents one by one, whatever the plan. Settings with which they would not be are refused
(`megatron_checks`).

Every rank of a replica (pipeline, tensor) needs the same packs: make the loader with `group=` the data-parallel group;
then every stage reads the data for itself. A replica without documents in a step runs one pack of padding.

Price beside Megatron's own step: two collectives of three numbers for the loss. Written from the sources of
Megatron-Core 0.16.1, and trained on it by tests/engines/test_megatron_step.py.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from evenload.errors import ConfigError, DataError
from evenload.integrations.batch_formats import megatron_batch, megatron_packed_seq_params, move_batch
from evenload.integrations.engines.megatron_checks import require_runnable, rows_multiple
from evenload.integrations.engines.megatron_model import balance_for_megatron
from evenload.integrations.packed_loader import PackedLoader
from evenload.integrations.packed_step import PackedStep, zero_weight_pack

ForwardStep = Callable[[Iterator[dict[str, Any]], torch.nn.Module], tuple[Tensor, Callable[[Tensor], Any]]]

_LOSS = "evenload loss"


@dataclass(frozen=True, kw_only=True)
class MegatronReport:
    """What one step did, the same on every rank but `num_micro_batches` and `num_without_work`.

    Args:
        loss: mean over the label tokens of the global batch, before the update.
        num_label_tokens: of the global batch.
        was_updated: False where Megatron left the update out, because gradients overflowed in fp16.
        grad_norm: of all parameters, before clipping; None where the optimizer does not compute it.
        num_micro_batches: that this replica ran.
        num_without_work: of these, packs of padding.
    """

    loss: float
    num_label_tokens: int
    was_updated: bool
    grad_norm: float | None
    num_micro_batches: int
    num_without_work: int


class MegatronTrainStep:
    """Trains the steps of a loader on Megatron-Core; collective in all its calls.

    Completes the model's configuration where Megatron's own training script does, and where nothing is set:
    `grad_scale_func` (the optimizer divides by its loss scale) and, with `overlap_grad_reduce`, `no_sync_func`
    (gradients are summed in the last micro-batch only).

    Args:
        model: as Megatron-Core's `DistributedDataParallel` wraps it.
        optimizer: of `megatron.core.optimizer.get_megatron_optimizer`.
        loader: with `engine="megatron"`, made on the data-parallel group; made without a model, its packs are balanced
            for this one.
        forward_step: of the caller's own model, in place of `gpt_forward_step`. Its loss function returns what
            `sum_of_losses` returns.

    Raises:
        ConfigError: settings with which Megatron-Core would train something else, or stop: see `megatron_checks`; a
            loader of another place than this rank's among the replicas.
    """

    def __init__(
        self, model: torch.nn.Module, optimizer: Any, loader: PackedLoader, *, forward_step: ForwardStep | None = None
    ) -> None:
        from megatron.core.utils import get_model_config  # type: ignore[missing-import]

        self._model: Any = model
        self._optimizer, self._forward_step = optimizer, forward_step or gpt_forward_step
        self._config = get_model_config(model)
        require_runnable(self._config, loader.options)
        _require_place(loader)
        balance_for_megatron(loader, model, self._config)
        if self._config.grad_scale_func is None:
            self._config.grad_scale_func = optimizer.scale_loss
        # Without it Megatron counts the gradients of its first step's micro-batches, and in a step of more of them sums
        # a bucket over replicas before the last ones are in it.
        wrapped: Any = model
        if wrapped.ddp_config.overlap_grad_reduce and self._config.no_sync_func is None:
            self._config.no_sync_func = wrapped.no_sync

    def __call__(self, step: PackedStep) -> MegatronReport:
        """One update: gradients of the global batch, summed over replicas, and the optimizer's step."""
        loss = self.accumulate(step)
        was_updated, grad_norm = self.update()
        return MegatronReport(
            loss=loss,
            num_label_tokens=step.num_label_tokens,
            was_updated=was_updated,
            grad_norm=grad_norm,
            num_micro_batches=max(1, len(step)),
            num_without_work=step.num_zero_weight if len(step) else 1,
        )

    def accumulate(self, step: PackedStep) -> float:
        """Forward and backward of all packs of this replica, and the sums over replicas.

        Returns:
            The loss of the global batch; its gradients are in every parameter's `main_grad`.

        Raises:
            DataError: the label tokens that the losses counted are not those of the plan.
        """
        from megatron.core.pipeline_parallel import get_forward_backward_func  # type: ignore[missing-import]

        without_work = megatron_batch(zero_weight_pack(rows_multiple(self._config)), step.num_label_tokens)
        batches = step.batches or (without_work,)
        self._model.zero_grad_buffer()
        self._optimizer.zero_grad()
        told = get_forward_backward_func()(
            forward_step_func=self._forward_step,
            data_iterator=iter(batches),
            model=self._model,
            num_microbatches=len(batches),
            # Not read where neighbours tell each other shapes; without a pipeline there are none.
            seq_length=max(batch["tokens"].shape[1] for batch in batches),
            micro_batch_size=1,
            forward_only=False,
        )
        return _global_loss(told, step, _device_of(self._model))

    def update(self) -> tuple[bool, float | None]:
        """Apply the gradients: whether that was done, and their norm before clipping (`MegatronReport`)."""
        was_updated, grad_norm, _ = self._optimizer.step()
        return bool(was_updated), None if grad_norm is None else float(grad_norm)


def gpt_forward_step(batches: Iterator[dict[str, Any]], model: torch.nn.Module) -> tuple[Tensor, Callable]:
    """Forward of one pack through a `GPTModel` stage: what the schedules of Megatron-Core call.

    Args:
        batches: of `format="megatron"`.

    Returns:
        Hidden states [T, 1, width] for the next stage, or the losses of all tokens [1, T]; and what makes the loss.
    """
    batch = move_batch(next(batches), _device_of(model))
    output = model(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        packed_seq_params=megatron_packed_seq_params(batch),
    )
    return output, partial(sum_of_losses, loss_mask=batch["loss_mask"])


def sum_of_losses(losses: Tensor, *, loss_mask: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The loss of a pack as `calculate_per_token_loss` wants it.

    Args:
        losses: [1, T] of tokens; loss_mask: [1, T], 0 where a token has no label.

    Returns:
        The sum over label tokens; their number, int32[]; both as float64[2], for the report of the step.
    """
    total, count = (losses * loss_mask).sum(), loss_mask.sum()
    told = torch.stack([total.detach().double(), count.double()])
    return total, count.to(torch.int32), {_LOSS: told}


def _global_loss(told: list[dict[str, Tensor]], step: PackedStep, device: torch.device) -> float:
    """Mean loss of the global batch on every rank, from what the last stages told of their packs."""
    from megatron.core import parallel_state  # type: ignore[missing-import]

    # Sum and number of losses, and packs of which nothing was told: only the last stages know, all have to stop.
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    if parallel_state.is_pipeline_last_stage():
        for entry in told:
            if _LOSS in entry:
                sums[:2] += entry[_LOSS]
            else:
                sums[2] += 1
        dist.all_reduce(sums, group=parallel_state.get_data_parallel_group())
    # All other stages hold zeros.
    dist.all_reduce(sums, group=parallel_state.get_pipeline_model_parallel_group())
    total, count, untold = sums.tolist()
    if untold:
        raise ConfigError(
            f"the loss function of forward_step told no '{_LOSS}' of {untold:.0f} packs; it has to return what "
            "megatron_step.sum_of_losses returns, whose third part holds the sum and the count of a pack's losses"
        )
    if count != step.num_label_tokens:
        raise DataError(
            f"step {step.plan.step}: the losses are of {count:.0f} label tokens, the plan of all replicas has "
            f"{step.num_label_tokens}; make the loader with group= the data-parallel group on every rank, and mask "
            "no further tokens in forward_step"
        )
    return total / max(1, count)


def _require_place(loader: PackedLoader) -> None:
    """All ranks of a replica train the same packs, and replicas different ones."""
    from megatron.core import parallel_state  # type: ignore[missing-import]

    place = (parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size())
    if (loader.rank, loader.world_size) != place:
        raise ConfigError(
            f"the loader is rank {loader.rank} of {loader.world_size}, Megatron-Core's data-parallel rank is "
            f"{place[0]} of {place[1]}: stages of one replica would wait for each other's packs for ever, or train "
            "documents twice. Make it with PackedLoader(..., group=parallel_state.get_data_parallel_group())"
        )


def _device_of(model: torch.nn.Module) -> torch.device:
    return next(model.parameters()).device
