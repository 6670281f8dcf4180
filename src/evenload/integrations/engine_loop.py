"""What adapters to engines share: `EngineLoop`, the loss of a pack, attention inside documents, what rank 0 reads."""

import logging
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from evenload.attention.backends import select_backend
from evenload.attention.range_attention import RangeAttention, RangeSizes, Scoring
from evenload.data.encoders import IGNORE_INDEX
from evenload.errors import CheckpointError, ConfigError, UnsupportedModelError
from evenload.feed.collate import PackBatch
from evenload.integrations.batch_formats import format_pack, move_batch
from evenload.integrations.loader_options import LoaderOptions
from evenload.integrations.packed_loader import PackedLoader, PackedStep, pad_pack, zero_weight_pack
from evenload.integrations.planner import model_spec_of
from evenload.types.model import ModelSpec, alike_model

PackLoss = Callable[[nn.Module, Any], Tensor]
"""`loss(model, batch)`: a scalar with a graph, from one call of the model: the sum over the micro-batch's label tokens,
divided by those of the global batch, so that all micro-batches of all ranks add up to its mean."""

Value = TypeVar("Value")
_log = logging.getLogger("evenload.loader")


class TrainedStep(NamedTuple):
    """Describes one update.

    Args:
        number: of updates made, over resumes; that of the step before where gradients overflowed (not `was_updated`).
        loss: float[], on the device: mean over the label tokens of the global batch, before the update.
        num_micro_batches: that this rank ran, those of padding alone included.
    """

    number: int
    loss: Tensor
    num_label_tokens: int
    num_micro_batches: int
    was_updated: bool


class EngineLoop(ABC):
    """Trains the steps of a loader; a subclass runs micro-batches, applies gradients and writes checkpoints.

    A global batch becomes one update with the gradient of its documents one by one, so neither ranks nor packs nor the
    strategy change what is trained.

    Args:
        model: packs are balanced for its `config` where the loader was made without a model.
        loader: of this rank. A `ConfigError` for one from which the engine would train something else, or never end.
        loss: of one micro-batch; default: `hf_pack_loss`. sequence_ranks: of groups that share every pack.
    """

    def __init__(
        self,
        model: Any,
        loader: PackedLoader,
        loss: PackLoss | None,
        *,
        engine: str,
        device: torch.device,
        sequence_ranks: int = 1,
    ) -> None:
        _refuse_loader(loader, loss, engine, sequence_ranks)
        balance_for_trained(loader, model, lambda: model_spec_of(getattr(model, "config", None)))
        self.loader, self._engine_name, self._device = loader, engine, device
        self._loss: PackLoss = loss or hf_pack_loss
        self._called, self._is_apart = model, False
        self.num_steps = 0
        """Updates made, over resumes."""

    def accumulate(self, step: PackedStep) -> Tensor:
        """Run forward and backward of one global batch, and return its loss, float[], before `update`; before the first
        one raise an `UnsupportedModelError` where the model mixes the documents of a pack. Collective."""
        if not self._is_apart:
            require_apart(self._called, self.loader.options, self._device, self._probed)
        self._is_apart = True
        options, total = self.loader.options, torch.zeros((), device=self._device)
        # A rank without any gradient would leave out the reductions that the others wait in.
        padding = zero_weight_pack(options.row_multiple)
        batches = step.batches or (format_pack(padding, options.format, step.num_label_tokens),)
        for index, batch in enumerate(batches):
            loss = self._run(move_batch(batch, self._device), index == len(batches) - 1)
            total = total + loss.detach()
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(total)
        return total

    def _own_share(self, batch: Any) -> Any:
        """Return what this rank runs of a batch."""
        return batch

    def _probed(self, batch: Any) -> Tensor:
        is_whole = self._loss is hf_pack_loss and self.loader.options.sequence_ranks == 1
        return own_logits(self._called, batch) if is_whole else self._loss(self._called, self._own_share(batch))

    @abstractmethod
    def _run(self, batch: Any, is_last: bool) -> Tensor:
        """Run forward and backward of a micro-batch on the device, and return its loss."""

    @abstractmethod
    def update(self) -> bool:
        """Apply the gradients, and forget them; return whether that was done. Collective."""

    def train(self, num_steps: int) -> Iterator[TrainedStep]:
        """Update until `num_steps` updates were made, over resumes and epochs, or the loader's epochs end; what the
        loop's body saves is after the update. Collective."""
        while self.num_steps < num_steps and not self.loader.has_ended:
            for step in self.loader.steps():
                loss, was_updated = self.accumulate(step), self.update()
                self.num_steps += was_updated
                yield TrainedStep(self.num_steps, loss, step.num_label_tokens, max(1, len(step)), was_updated)
                if self.num_steps >= num_steps:
                    break

    def _require_equal_counts(self, reason: str) -> None:
        if self.loader.world_size > 1 and not self.loader.options.has_equal_counts:
            why = f"{self._engine_name} {reason}, so ranks would wait for ever for one with fewer micro-batches"
            raise ConfigError(f"equal_micro_batches is off, but {why}; leave it on")


def _refuse_loader(loader: PackedLoader, loss: PackLoss | None, engine: str, sequence_ranks: int) -> None:
    options, shared = loader.options, loader.options.sequence_ranks
    if options.evaluation:
        raise ConfigError(f"{engine} trains, and the loader was made with evaluation=True; make another one without it")
    if loss is None and options.format != "hf":
        fix = 'make it with format="hf", or give loss=function(model, batch)'
        raise ConfigError(f"the loader has format '{options.format}', which the loop's own loss does not read; {fix}")
    if shared != sequence_ranks:
        groups = f"the loader's sequence_ranks is {shared}, and {engine} has sequence groups of {sequence_ranks}"
        raise ConfigError(f"{groups}; give both the same, on DeepSpeed by mpu = share_sequences(model, ranks)")
    is_alone = not (dist.is_available() and dist.is_initialized())
    rank, world_size = (0, 1) if is_alone else (dist.get_rank(), dist.get_world_size())
    fix = f"make it after the process group, without a place. Model-parallel ranks are not tested with {engine}"
    require_place(loader, rank // shared, world_size // shared, "torch.distributed has", fix)


def require_place(loader: PackedLoader, rank: int, world_size: int, other: str, fix: str) -> None:
    """Raise a `ConfigError` where the loader has another place than the engine."""
    if (loader.rank, loader.world_size) != (rank, world_size):
        own = f"the loader is rank {loader.rank} of {loader.world_size}"
        raise ConfigError(f"{own}, {other} {rank} of {world_size}; {fix}")


def balance_for_trained(loader: PackedLoader, model: nn.Module, describe: Callable[[], ModelSpec]) -> None:
    """Balance the packs of a loader that was made without a model for the one that is trained; where `describe` raises
    a `ConfigError`, by the sizes of its weights. Collective."""
    if not loader.model_is_assumed:
        return
    try:
        spec = describe()
    except ConfigError as err:
        spec = spec_of_weights(model, loader.options.sequence_ranks)
        if loader.rank == 0:
            _log.info("packs are balanced by the sizes of the model's weights alone: %s", err)
    loader.balance_for(spec)


def spec_of_weights(model: nn.Module, num_heads: int) -> ModelSpec:
    """Describe a model by its weights alone: the longest list of modules are its layers, every token passes all their
    matrices, and attention is as wide as most of them. Its vocabulary is not read."""
    lists = (module for module in model.modules() if isinstance(module, nn.ModuleList))
    layers = max(lists, key=len, default=nn.ModuleList([model]))
    # ZeRO-3 keeps the shape of a weight that it has taken apart.
    shapes = [tuple(getattr(weight, "ds_shape", weight.shape)) for weight in layers.parameters()]
    matrices = [shape for shape in shapes if len(shape) > 1]
    width = Counter(size for shape in matrices for size in shape[-2:]).most_common(1)[0][0] if matrices else 1
    ffn_weights = sum(map(math.prod, matrices)) // len(layers) - 4 * width**2
    sizes = {"num_heads": num_heads, "num_kv_heads": num_heads, "head_dim": max(1, width // num_heads)}
    sizes |= {"hidden_size": width, "ffn_hidden_size": max(1, ffn_weights // (3 * width)), "vocab_size": 1}
    return alike_model(name=type(model).__name__, num_layers=len(layers), tied_embeddings=False, **sizes)


def hf_pack_loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """Return the cross-entropy of a transformers causal model's logits (`PackLoss`), in float32 at least, without
    auxiliary losses (routers of MoE); of a rank's share of an `hf` batch, what adds up to the batch's."""
    # The model's own loss may take no `num_items_in_batch`.
    logits = model(**model_inputs(batch)).logits[0]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    labels = batch["shift_labels"][0] if "shift_labels" in batch else shifted_labels(batch)[0]
    total = nn.functional.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="sum")
    return total / batch["num_items_in_batch"]


def own_logits(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """Return the logits of the second document of `require_apart`'s pack."""
    return model(**model_inputs(batch)).logits[0, _FIRST : _FIRST + _SECOND]


_FIRST, _SECOND = 8, 16


def require_apart(
    model: Any, options: LoaderOptions, device: torch.device, run: Callable[[Any], Tensor], *, is_rough: bool = False
) -> None:
    """Raise an `UnsupportedModelError` where what `run` gives of the second document of a pack changes with the first
    one, on the device, with the kernels and arguments that training has. Collective.

    Of a loss only the labels behind the boundary count, where most of a leak is. `is_rough`: documents share rounding.
    """
    name, config = type(model).__name__, getattr(model, "config", None)
    fix = "train with 'evenload train', or without packs, a document a row"
    targets = np.full(_FIRST + _SECOND, IGNORE_INDEX)
    targets[_FIRST : _FIRST + 4] = 1, 2, 3, 4
    results = []
    for first in (1, 2):
        ids = np.arange(_FIRST + _SECOND) % 7
        ids[:_FIRST] = (ids[:_FIRST] + first) % 7
        edges = np.array([0, _FIRST, _SECOND])
        pack = PackBatch(
            doc_ids=edges[:2], starts=edges[:2] * 0, stops=edges[1:], token_ids=ids, targets=targets,
            positions=np.concatenate([np.arange(_FIRST), np.arange(_SECOND)]), num_padding_tokens=0,
        )  # fmt: skip
        batch = format_pack(pad_pack(pack, options.computed_tokens(pack.num_tokens)), options.format, 4)
        with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(0)
            try:
                results.append(run(move_batch(batch, device)).float())
            except ValueError as error:
                if "packed sequences" not in str(error):
                    raise
                why = f"{name} does not keep the documents of a pack apart: {error} Or {fix}"
                raise UnsupportedModelError(why) from error
    # Equal shapes give equal bits, unless other rows go to the same expert or share the scale of an FP8 tensor.
    experts = any(getattr(config, key, None) for key in ("num_experts", "num_local_experts", "n_routed_experts"))
    limit = 0.05 if experts or is_rough else 1e-4
    off = (results[0] - results[1]).abs().max() / results[0].abs().max().clamp_min(1e-30)
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(off, dist.ReduceOp.MAX)
    if not off <= limit:
        attention = getattr(config, "_attn_implementation", "?")
        raise UnsupportedModelError(
            f"{name} does not keep the documents of a pack apart: another first one changes what the second gives by "
            f"{float(off):.2g}. Load it with another attn_implementation than '{attention}' (sdpa, flash_attention_2); "
            f"where that does not help, {fix}"
        )


def shifted_labels(batch: dict[str, Any]) -> Tensor:
    """Return the labels of an `hf` batch, int64[1, T], at the token that predicts each; -100 at the last."""
    return nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=IGNORE_INDEX)


def model_inputs(batch: dict[str, Any]) -> dict[str, Any]:
    """Return what a transformers model reads of an `hf` batch to make logits."""
    return {key: value for key, value in batch.items() if key not in ("labels", "shift_labels", "num_items_in_batch")}


def document_attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float) -> Tensor:
    """Return causal attention of each document of a pack to itself, with gradients, by Evenload's backends.

    Args:
        q: [T, H, D], as what is returned; k, v: [T, G, D], H a multiple of G.
        cu_seqlens: where documents begin: 0, ..., T; read from the device once a pack, not once a layer.
    """
    if not hasattr(cu_seqlens, "evenload_sizes"):
        lengths = [size for size in cu_seqlens.diff().tolist() if size]
        cu_seqlens.evenload_sizes = RangeSizes(lengths, lengths)  # type: ignore[missing-attribute]
    sizes: RangeSizes = cu_seqlens.evenload_sizes  # type: ignore[missing-attribute]
    backend = select_backend("auto", q.device.type, dtype=q.dtype, head_dim=q.shape[-1])
    return _DocumentAttention.apply(q, k, v, sizes, backend, Scoring(scale))  # type: ignore[bad-return]


class _DocumentAttention(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[bad-override]
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sizes: RangeSizes, backend: RangeAttention, scoring: Scoring
    ) -> Tensor:
        out, lse = backend.forward(q, [(k, v)], sizes, scoring)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.settings = sizes, backend, scoring
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[bad-override]
        q, k, v, out, lse = ctx.saved_tensors
        sizes, backend, scoring = ctx.settings
        dq, dk, dv = backend.backward(grad.contiguous(), q, [(k, v)], out, lse, sizes, scoring)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None


def from_rank_zero(read: Callable[[], Value], failure: str) -> Value:
    """Return on all ranks what `read` returns on rank 0, or raise its `CheckpointError`, with `failure` before the text
    of an `OSError`: ranks that each read could see different files, and wait for those that raise. Collective."""
    is_alone = not (dist.is_available() and dist.is_initialized())
    reply: list[Any] = [None, None]
    if is_alone or dist.get_rank() == 0:
        try:
            reply[0] = read()
        except CheckpointError as error:
            reply[1] = str(error)
        except OSError as error:
            reply[1] = f"{failure}: {error}"
    if not is_alone:
        dist.broadcast_object_list(reply, src=0)
    if reply[1] is not None:
        raise CheckpointError(reply[1])
    return reply[0]
