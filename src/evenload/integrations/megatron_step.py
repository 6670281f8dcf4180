"""`MegatronTrainStep`: optimizer steps of Megatron-Core on the packs of a `PackedLoader`.

    train_step = MegatronTrainStep(model, optimizer, loader)
    for step in loader.steps():
        report = train_step(step)

The loss is a sum (`calculate_per_token_loss`), which `finalize_model_grads` divides by the label tokens of all
replicas. Every rank of a replica (pipeline, tensor) needs the same packs: make the loader with `group=` the
data-parallel group.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from evenload.errors import ConfigError, DataError
from evenload.integrations.batch_formats import megatron_batch, megatron_packed_seq_params, move_batch
from evenload.integrations.engine_loop import balance_for_trained, document_attention, require_place
from evenload.integrations.loader_options import LoaderOptions
from evenload.integrations.packed_loader import PackedLoader, PackedStep, zero_weight_pack
from evenload.types.model import ModelSpec, alike_model

ForwardStep = Callable[[Iterator[dict[str, Any]], torch.nn.Module], tuple[Tensor, Callable[[Tensor], Any]]]

_LOSS = "evenload loss"
_PLAIN_ATTENTION = {
    "attention_dropout": 0.0,
    "window_size": None,
    "multi_latent_attention": False,
    "softmax_type": "vanilla",
    "qk_clip": False,
}
"""Settings of a `TransformerConfig` that change attention, with the values that `document_layer_spec` supports."""


class MegatronReport(NamedTuple):
    """Describes one step, the same on every rank but `num_micro_batches`.

    Args:
        loss: mean over the label tokens of the global batch, before the update.
        was_updated: False where Megatron left the update out, because gradients overflowed in fp16.
        grad_norm: of all parameters, before clipping; None where the optimizer does not compute it.
        num_micro_batches: that this replica ran, those of padding alone included.
    """

    loss: float
    num_label_tokens: int
    was_updated: bool
    grad_norm: float | None
    num_micro_batches: int


class MegatronTrainStep:
    """Trains the steps of a loader on Megatron-Core; collective in all its calls.

    Completes the model's configuration (`grad_scale_func`, `no_sync_func`) as Megatron's own training script does.

    Args:
        model: as Megatron-Core's `DistributedDataParallel` wraps it; optimizer: of its `get_megatron_optimizer`.
        loader: with `engine="megatron"`, on the data-parallel group; without a model it is balanced for this one. A
            `ConfigError` for one of another rank, and for settings that `require_runnable` refuses.
        forward_step: in place of `gpt_forward_step`. Its loss function returns what `sum_of_losses` returns.
    """

    def __init__(
        self, model: torch.nn.Module, optimizer: Any, loader: PackedLoader, *, forward_step: ForwardStep | None = None
    ) -> None:
        from megatron.core import parallel_state  # type: ignore[missing-import]
        from megatron.core.utils import get_model_config  # type: ignore[missing-import]

        self._model = wrapped = cast(Any, model)
        self._optimizer, self._forward_step = optimizer, forward_step or gpt_forward_step
        self._config = config = get_model_config(model)
        require_runnable(config, loader.options)
        fix = "make it with PackedLoader(group=parallel_state.get_data_parallel_group())"
        place = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
        require_place(loader, *place, "Megatron-Core's data-parallel rank is", fix)
        balance_for_trained(loader, model, lambda: model_of(model, config))
        if config.grad_scale_func is None:
            config.grad_scale_func = optimizer.scale_loss
        # Without it Megatron sums a bucket over replicas after as many micro-batches as the first step had.
        if wrapped.ddp_config.overlap_grad_reduce and config.no_sync_func is None:
            config.no_sync_func = wrapped.no_sync

    def __call__(self, step: PackedStep) -> MegatronReport:
        """Make one update: gradients of the global batch, summed over replicas, and the optimizer's step."""
        loss = self.accumulate(step)
        was_updated, grad_norm = self.update()
        return MegatronReport(loss, step.num_label_tokens, was_updated, grad_norm, max(1, len(step)))

    def accumulate(self, step: PackedStep) -> float:
        """Run forward and backward of all packs, sum over replicas, and return the loss of the global batch; gradients
        are in every parameter's `main_grad`. Raises a `DataError` for losses of other label tokens than the plan's."""
        from megatron.core.pipeline_parallel import get_forward_backward_func  # type: ignore[missing-import]

        padding = zero_weight_pack(_rows_multiple(self._config))
        batches = step.batches or (megatron_batch(padding, step.num_label_tokens),)
        self._model.zero_grad_buffer()
        self._optimizer.zero_grad()
        results = get_forward_backward_func()(
            forward_step_func=self._forward_step,
            data_iterator=iter(batches),
            model=self._model,
            num_microbatches=len(batches),
            # Stages that send each other shapes do not read it.
            seq_length=max(batch["tokens"].shape[1] for batch in batches),
            micro_batch_size=1,
            forward_only=False,
        )
        return _global_loss(results, step, next(self._model.parameters()).device)

    def update(self) -> tuple[bool, float | None]:
        """Apply the gradients; return whether that was done, and their norm before clipping."""
        was_updated, grad_norm, _ = self._optimizer.step()
        return bool(was_updated), None if grad_norm is None else float(grad_norm)


def gpt_forward_step(batches: Iterator[dict[str, Any]], model: torch.nn.Module) -> tuple[Tensor, Callable]:
    """Run one pack of format `megatron` through a `GPTModel` stage, as the schedules of Megatron-Core call it. Returns
    hidden states [T, 1, width] for the next stage, or the losses of all tokens [1, T]; and `sum_of_losses`."""
    batch = move_batch(next(batches), next(model.parameters()).device)
    packed = megatron_packed_seq_params(batch)
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"], packed_seq_params=packed)
    return output, partial(sum_of_losses, loss_mask=batch["loss_mask"])


def sum_of_losses(losses: Tensor, *, loss_mask: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the loss of a pack as `calculate_per_token_loss` wants it: the sum over label tokens; their number,
    int32[]; both as float64[2]. `losses` are [1, T], and `loss_mask` [1, T] is 0 where a token has no label."""
    total, count = (losses * loss_mask).sum(), loss_mask.sum()
    sums = torch.stack([total.detach().double(), count.double()])
    return total, count.to(torch.int32), {_LOSS: sums}


def _global_loss(results: list[dict[str, Tensor]], step: PackedStep, device: torch.device) -> float:
    """Return the mean loss of the global batch on every rank, from the results of the last stages' packs."""
    from megatron.core import parallel_state  # type: ignore[missing-import]

    # Sum and number of losses, and packs without them: the last stages count them, and all ranks have to stop.
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    if parallel_state.is_pipeline_last_stage():
        losses = [entry[_LOSS] for entry in results if _LOSS in entry]
        sums[:2] += sum(losses)
        sums[2] = len(results) - len(losses)
        dist.all_reduce(sums, group=parallel_state.get_data_parallel_group())
    # All other stages hold zeros.
    dist.all_reduce(sums, group=parallel_state.get_pipeline_model_parallel_group())
    total, count, missing = sums.tolist()
    if missing:
        raise ConfigError(f"forward_step returned no '{_LOSS}' for {missing:.0f} packs; return that of sum_of_losses")
    if count != step.num_label_tokens:
        counts = f"the losses are of {count:.0f} label tokens, the plan has {step.num_label_tokens}"
        fix = "make the loader with group= the data-parallel group, and mask no further tokens in forward_step"
        raise DataError(f"step {step.plan.step}: {counts}; {fix}")
    return total / max(1, count)


def require_runnable(config: Any, options: LoaderOptions) -> None:
    """Raise a `ConfigError` for settings of the `TransformerConfig` that Megatron-Core would run wrong, or for ever."""
    for message in _unrunnable(config, options):
        raise ConfigError(message)


def _rows_multiple(config: Any) -> int:
    return config.tensor_model_parallel_size if config.sequence_parallel else 1


def _unrunnable(config: Any, options: LoaderOptions) -> Iterator[str]:
    if options.format != "megatron":
        yield f"format of the loader is '{options.format}'; make it with PackedLoader(..., engine=\"megatron\")"
    if not config.calculate_per_token_loss:
        yield "calculate_per_token_loss is False: the loss would be a mean of micro-batches' means; set it to True"
    if config.finalize_model_grads_func is None:
        fix = "set it to megatron.core.distributed.finalize_model_grads"
        yield f"finalize_model_grads_func is None: gradients would not be summed over replicas; {fix}"
    if (stages := config.pipeline_model_parallel_size) > 1 and not config.variable_seq_lengths:
        yield f"variable_seq_lengths is False, so {stages} stages would expect packs of one length; set it to True"
    if (ranks := config.context_parallel_size) > 1:
        yield f"context_parallel_size is {ranks}, which packs are not cut for; use 1, or train with 'evenload train'"
    if options.pack_multiple % (multiple := _rows_multiple(config)):
        why = f"sequence_parallel divides the rows of a pack among {multiple} tensor-parallel ranks"
        yield f"{why}, and pack_multiple is {options.pack_multiple}; give PackedLoader pack_multiple={multiple}"
    if (experts := config.num_moe_experts) is not None:
        yield f"num_moe_experts is {experts}, whose router depends on packing; train experts with 'evenload train'"
    if (virtual := config.virtual_pipeline_model_parallel_size) is not None:
        yield f"virtual_pipeline_model_parallel_size is {virtual}, which waits for ever; leave it out, for 1F1B"


def model_of(model: Any, config: Any) -> ModelSpec:
    """Return what the cost model reads of a dense `GPTModel`, of all its stages; `model` is one of them, wrapped or
    not. A `ConfigError` where layers are not priced."""
    # Megatron's wrappers are `DistributedDataParallel` and `Float16Module`.
    while hasattr(model, "module"):
        model = model.module
    fix = "name the model for which packs are balanced: PackedLoader(model=...)"
    for name in ("vocab_size", "share_embeddings_and_output_weights", "position_embedding_type", "max_sequence_length"):
        if not hasattr(model, name):
            raise ConfigError(f"{type(model).__name__} has no {name}, so it is no GPTModel of Megatron-Core; {fix}")
    for name in ("num_moe_experts", "multi_latent_attention", "window_size", "heterogeneous_block_specs"):
        if getattr(config, name, None):
            raise ConfigError(f"{name} of Megatron-Core's configuration is {getattr(config, name)}; {fix}")
    return alike_model(
        name="megatron",
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_query_groups,
        head_dim=config.kv_channels,
        ffn_hidden_size=config.ffn_hidden_size,
        vocab_size=model.vocab_size,
        tied_embeddings=model.share_embeddings_and_output_weights,
        gated_ffn=config.gated_linear_unit,
        biases=config.add_bias_linear,
        position_rows=model.max_sequence_length if model.position_embedding_type == "learned_absolute" else 0,
        bytes_per_element=2 if config.bf16 or config.fp16 else 4,
    )


def document_layer_spec(config: Any) -> Any:
    """Return a `ModuleSpec` of layers whose attention reads `PackedSeqParams`: `GPTModel(transformer_layer_spec=...)`.
    A `ConfigError` where they lack a setting of the `TransformerConfig`'s attention."""
    for name, plain in _PLAIN_ATTENTION.items():
        if getattr(config, name) != plain:
            fix = f"set it to {plain}, or use Transformer Engine's layers"
            raise ConfigError(f"{name} is {getattr(config, name)}, which document_layer_spec does not have; {fix}")
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # type: ignore[missing-import]

    spec: Any = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm,
        normalization=config.normalization,
    )
    spec.submodules.self_attention.submodules.core_attention = DocumentAttention
    return spec


class DocumentAttention(torch.nn.Module):
    """Runs causal attention inside each document of a pack, in the place of `TEDotProductAttention`.

    Args:
        config: the model's `TransformerConfig`.
        softmax_scale: factor of q·k; None = 1 / sqrt(head dimension).
        settings: what else Megatron-Core builds attention with, none of which changes it.
    """

    def __init__(self, config: Any, *, softmax_scale: float | None = None, **settings: Any) -> None:
        super().__init__()
        self.scale = 1.0 / math.sqrt(config.kv_channels) if softmax_scale is None else softmax_scale

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **settings: Any
    ) -> Tensor:
        """Return the attention of one pack, [T, H · D], of query [T, H, D], key and value [T, G, D]; a `ConfigError`
        where `packed_seq_params` of the settings have no cumulative lengths."""
        packed = settings.get("packed_seq_params")
        if packed is None or packed.qkv_format != "thd" or attention_mask is not None:
            fix = "give the model packed_seq_params, and no attention_mask"
            raise ConfigError(f"document_layer_spec trains packs only; {fix}")
        return document_attention(query, key, value, packed.cu_seqlens_q, self.scale).flatten(1)
