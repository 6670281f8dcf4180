"""A pack in the names of each ecosystem: same arrays, other keys, other label convention.

| format | made for | labels |
|---|---|---|
| `hf` | transformers models, Trainer, TRL, Accelerate, DeepSpeed | not shifted, -100 at the first token of a document |
| `varlen` | `torch.nn.attention.varlen.varlen_attn`, flash-attn | `targets`: shifted, -100 at the last token |
| `torchtitan` | torchtitan 0.3.0: `(inputs, labels)`, `VarlenMetadata` as masks | shifted, -100 at the last token |
| `megatron` | Megatron-Core, fields of `PackedSeqParams` | shifted, 0 with `loss_mask` 0 where there is no loss |
| `pack` | everything else | the `PackBatch` itself |

Every format marks where documents begin: cumulative lengths in int32 from 0, the longest as host integers (so that no
kernel waits for the device), positions from 0 in every document. No attention mask is made. T = tokens of the pack, all
on the CPU; everything but the labels shares the pack's memory.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch

from evenload.data.encoders import IGNORE_INDEX
from evenload.errors import ConfigError
from evenload.feed.collate import PackBatch

BatchFormat = Literal["hf", "varlen", "torchtitan", "megatron", "pack"]
BATCH_FORMATS: tuple[BatchFormat, ...] = get_args(BatchFormat)
PREFIX_FORMATS: tuple[BatchFormat, ...] = ("varlen", "pack")
"""Those in which attention may have more keys than queries."""


class VarlenMetadata(NamedTuple):
    """Holds torchtitan's tuple of this name: int32[documents + 1] twice, then host integers.

    `cu_seq_q_host` holds the values of `cu_seq_q` for kernels that want them on the host.
    """

    cu_seq_q: torch.Tensor
    cu_seq_k: torch.Tensor
    max_q: int
    max_k: int
    cu_seq_q_host: tuple[int, ...] | None = None


def require_format(format: str) -> None:
    """Raise a `ConfigError` for a format that does not exist."""
    if format not in BATCH_FORMATS:
        raise ConfigError(f"format is '{format}'; choose one of {', '.join(BATCH_FORMATS)}")


def format_pack(pack: PackBatch, format: BatchFormat, num_label_tokens: int) -> Any:
    """Return the pack in a format.

    Args:
        num_label_tokens: of the whole global batch on all ranks: what the sum of the losses is divided by.

    Raises:
        ConfigError: no such format.
    """
    require_format(format)
    return _MAKERS[format](pack, num_label_tokens)


def hf_batch(pack: PackBatch, num_label_tokens: int) -> dict[str, Any]:
    """Make the keyword arguments of a transformers causal model: `model(**batch).loss`.

    Returns:
        `input_ids`, `labels`, `position_ids`: int64[1, T]; `cu_seq_lens_q`, `cu_seq_lens_k`: int32[documents + 1];
        `max_length_q`, `max_length_k`: int; `num_items_in_batch`: int64[]; `use_cache`: False, because with a cache
        the models ignore restarting positions, and the documents of a pack would attend to each other.
    """
    labels = np.full_like(pack.targets, IGNORE_INDEX)
    # The target of a document's last token is -100, so that of the token before a document's first one is.
    labels[1:] = pack.targets[:-1]
    return {
        "input_ids": torch.from_numpy(pack.token_ids)[None],
        "labels": torch.from_numpy(labels)[None],
        "position_ids": torch.from_numpy(pack.positions)[None],
        "cu_seq_lens_q": torch.from_numpy(pack.cu_seqlens_q),
        "cu_seq_lens_k": torch.from_numpy(pack.cu_seqlens_k),
        "max_length_q": pack.max_seqlen_q,
        "max_length_k": pack.max_seqlen_k,
        "num_items_in_batch": torch.tensor(max(1, num_label_tokens)),
        "use_cache": False,
    }


def varlen_batch(pack: PackBatch, num_label_tokens: int) -> dict[str, Any]:
    """Make flat arrays for kernels of variable length.

    Returns:
        `input_ids`, `targets`, `positions`: int64[T]; `cu_seq_q`, `cu_seq_k`: int32[slices + 1]; `max_q`, `max_k`: int;
        `num_label_tokens`: int, at least 1.
    """
    return {
        "input_ids": torch.from_numpy(pack.token_ids),
        "targets": torch.from_numpy(pack.targets),
        "positions": torch.from_numpy(pack.positions),
        "cu_seq_q": torch.from_numpy(pack.cu_seqlens_q),
        "cu_seq_k": torch.from_numpy(pack.cu_seqlens_k),
        "max_q": pack.max_seqlen_q,
        "max_k": pack.max_seqlen_k,
        "num_label_tokens": max(1, num_label_tokens),
    }


def torchtitan_batch(pack: PackBatch, num_label_tokens: int) -> tuple[dict[str, Any], torch.Tensor]:
    """Make inputs and labels, as torchtitan's data loaders yield them.

    Returns:
        `{"input": int64[1, T], "positions": int64[1, T], "attention_masks": VarlenMetadata}` and labels int64[1, T].
    """
    inputs = {
        "input": torch.from_numpy(pack.token_ids)[None],
        "positions": torch.from_numpy(pack.positions)[None],
        "attention_masks": VarlenMetadata(
            torch.from_numpy(pack.cu_seqlens_q),
            torch.from_numpy(pack.cu_seqlens_k),
            pack.max_seqlen_q,
            pack.max_seqlen_k,
            tuple(pack.cu_seqlens_q.tolist()),
        ),
    }
    return inputs, torch.from_numpy(pack.targets)[None]


def megatron_batch(pack: PackBatch, num_label_tokens: int) -> dict[str, Any]:
    """Make what a Megatron-Core `forward_step` hands to `GPTModel`.

    Returns:
        `tokens`, `labels`, `position_ids`: int64[1, T]; `loss_mask`: float32[1, T]; `attention_mask`: None;
        `packed_seq_params`: the fields of `PackedSeqParams` as a dictionary (`megatron_packed_seq_params` makes the
        object); `num_label_tokens`: int, at least 1.
    """
    has_loss = pack.targets != IGNORE_INDEX
    return {
        "tokens": torch.from_numpy(pack.token_ids)[None],
        "labels": torch.from_numpy(np.where(has_loss, pack.targets, 0))[None],
        "loss_mask": torch.from_numpy(has_loss.astype(np.float32))[None],
        "position_ids": torch.from_numpy(pack.positions)[None],
        "attention_mask": None,
        "packed_seq_params": {
            "qkv_format": "thd",
            "cu_seqlens_q": torch.from_numpy(pack.cu_seqlens_q),
            "cu_seqlens_kv": torch.from_numpy(pack.cu_seqlens_k),
            "max_seqlen_q": pack.max_seqlen_q,
            "max_seqlen_kv": pack.max_seqlen_k,
        },
        "num_label_tokens": max(1, num_label_tokens),
    }


_MAKERS: dict[BatchFormat, Callable[[PackBatch, int], Any]] = {
    "hf": hf_batch,
    "varlen": varlen_batch,
    "torchtitan": torchtitan_batch,
    "megatron": megatron_batch,
    "pack": lambda pack, _: pack,
}


def megatron_packed_seq_params(batch: dict[str, Any]) -> Any:
    """Make Megatron-Core's own `PackedSeqParams` of a batch, its tensors where they are.

    Raises:
        ConfigError: megatron-core is not installed.
    """
    try:
        from megatron.core.packed_seq_params import PackedSeqParams  # type: ignore[missing-import]
    except ImportError as err:
        raise ConfigError(
            "PackedSeqParams needs megatron-core, which is not installed; install it, or read the fields in "
            'batch["packed_seq_params"]'
        ) from err
    return PackedSeqParams(**batch["packed_seq_params"])


def move_batch(batch: Any, device: torch.device | str) -> Any:
    """Return the batch with its tensors on a device; cumulative lengths too, host integers stay."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, VarlenMetadata):
        return VarlenMetadata(*(move_batch(part, device) for part in batch))
    if isinstance(batch, dict):
        return {key: move_batch(part, device) for key, part in batch.items()}
    if isinstance(batch, tuple):
        return tuple(move_batch(part, device) for part in batch)
    return batch
