"""`format_pack`: a pack in the names of each ecosystem; same arrays, other keys, other label convention.

    hf           transformers, Trainer, TRL, Accelerate, DeepSpeed
    varlen       torch.nn.attention.varlen, flash-attn
    torchtitan   torchtitan 0.3.0: inputs, with `VarlenMetadata` as masks, and labels
    megatron     Megatron-Core, with the fields of `PackedSeqParams`
    pack         everything else: the `PackBatch` itself

docs/loader.md lists the keys. Tokens, labels and positions are int64[1, T] (`varlen`: [T]) on the CPU, cumulative
lengths int32[documents + 1] from 0, the longest as host integers. Labels of `hf` are not shifted, -100 at a document's
first token; all others are, -100 at its last. All but the labels share the pack's memory.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from evenload.data.encoders import IGNORE_INDEX
from evenload.errors import ConfigError
from evenload.feed.collate import PackBatch

BatchFormat = Literal["hf", "varlen", "torchtitan", "megatron", "pack"]


class VarlenMetadata(NamedTuple):
    """Holds torchtitan's tuple of this name; `cu_seq_q_host` has the values of `cu_seq_q` on the host."""

    cu_seq_q: torch.Tensor
    cu_seq_k: torch.Tensor
    max_q: int
    max_k: int
    cu_seq_q_host: tuple[int, ...] | None = None


def format_pack(pack: PackBatch, format: BatchFormat, num_label_tokens: int) -> Any:
    """Return the pack in a format; the sum of the losses is divided by `num_label_tokens` of the whole global batch."""
    return _MAKERS[format](pack, num_label_tokens)


def _row(values: NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(values)[None]


def _edges(pack: PackBatch, *names: str) -> dict[str, Any]:
    """Name the cumulative lengths of queries and keys and the longest of each."""
    edges = torch.from_numpy(pack.cu_seqlens_q), torch.from_numpy(pack.cu_seqlens_k)
    return dict(zip(names, (*edges, pack.max_seqlen_q, pack.max_seqlen_k), strict=True))


def hf_batch(pack: PackBatch, num_label_tokens: int) -> dict[str, Any]:
    """Make the keyword arguments of a transformers causal model: `model(**batch).loss`."""
    labels = np.full_like(pack.targets, IGNORE_INDEX)
    # The target of a document's last token is -100, so that of the token before a document's first one is.
    labels[1:] = pack.targets[:-1]
    rows = {"input_ids": _row(pack.token_ids), "labels": _row(labels), "position_ids": _row(pack.positions)}
    edges = _edges(pack, "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
    # Kernels of convolutions and state spaces read nothing else; without them transformers raises, where it would leak.
    rows["seq_idx"] = _row(np.repeat(np.arange(len(pack.stops), dtype=np.int32), pack.stops - pack.starts))
    # With a cache the models ignore that positions restart: documents of a pack would attend to each other.
    return rows | edges | {"num_items_in_batch": torch.tensor(max(1, num_label_tokens)), "use_cache": False}


def _varlen_batch(pack: PackBatch, num_label_tokens: int) -> dict[str, Any]:
    columns = {"input_ids": pack.token_ids, "targets": pack.targets, "positions": pack.positions}
    batch: dict[str, Any] = {name: torch.from_numpy(column) for name, column in columns.items()}
    edges = _edges(pack, "cu_seq_q", "cu_seq_k", "max_q", "max_k")
    return batch | edges | {"num_label_tokens": max(1, num_label_tokens)}


def _torchtitan_batch(pack: PackBatch, num_label_tokens: int) -> tuple[dict[str, Any], torch.Tensor]:
    edges = _edges(pack, "cu_seq_q", "cu_seq_k", "max_q", "max_k")
    masks = VarlenMetadata(**edges, cu_seq_q_host=tuple(pack.cu_seqlens_q.tolist()))
    inputs = {"input": _row(pack.token_ids), "positions": _row(pack.positions), "attention_masks": masks}
    return inputs, _row(pack.targets)


def megatron_batch(pack: PackBatch, num_label_tokens: int) -> dict[str, Any]:
    """Make what a Megatron-Core `forward_step` hands to `GPTModel`; a token without a loss has label 0 and mask 0."""
    has_loss = pack.targets != IGNORE_INDEX
    edges = _edges(pack, "cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_kv")
    return {
        "tokens": _row(pack.token_ids),
        "labels": _row(np.where(has_loss, pack.targets, 0)),
        "loss_mask": _row(has_loss.astype(np.float32)),
        "position_ids": _row(pack.positions),
        "attention_mask": None,
        "packed_seq_params": {"qkv_format": "thd"} | edges,
        "num_label_tokens": max(1, num_label_tokens),
    }


_MAKERS: dict[str, Callable[[PackBatch, int], Any]] = {
    "hf": hf_batch,
    "varlen": _varlen_batch,
    "torchtitan": _torchtitan_batch,
    "megatron": megatron_batch,
    "pack": lambda pack, _: pack,
}


def megatron_packed_seq_params(batch: dict[str, Any]) -> Any:
    """Make Megatron-Core's `PackedSeqParams` of a batch; a `ConfigError` where megatron-core is not installed."""
    try:
        from megatron.core.packed_seq_params import PackedSeqParams  # type: ignore[missing-import]
    except ImportError as err:
        fix = 'install it, or read the fields in batch["packed_seq_params"]'
        raise ConfigError(f"PackedSeqParams needs megatron-core, which is not installed; {fix}") from err
    return PackedSeqParams(**batch["packed_seq_params"])


def move_batch(batch: Any, device: torch.device | str) -> Any:
    """Return the batch with its tensors on a device, cumulative lengths too; host integers stay."""
    return with_tensors(batch, lambda tensor: tensor.to(device, non_blocking=True))


def pin_batch(batch: Any) -> Any:
    """Return the batch, where there is a GPU with its tensors in page-locked memory, from where `move_batch` copies
    beside compute. This has never run: no GPU was there."""
    return with_tensors(batch, torch.Tensor.pin_memory) if torch.cuda.is_available() else batch


def with_tensors(batch: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return the batch with each of its tensors changed; all else stays."""
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, dict):
        return {key: with_tensors(part, change) for key, part in batch.items()}
    if isinstance(batch, tuple):
        parts = (with_tensors(part, change) for part in batch)
        return VarlenMetadata(*parts) if isinstance(batch, VarlenMetadata) else tuple(parts)
    return batch
