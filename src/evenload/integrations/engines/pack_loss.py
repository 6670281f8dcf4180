"""Loss of one micro-batch: the sum over its label tokens, divided by those of the whole global batch.

Summed over all micro-batches of all ranks it is the mean over the global batch's label tokens, whatever packed them,
and so is its gradient. A mean over the micro-batch would weigh a token by how full its pack is.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from evenload.data.encoders import IGNORE_INDEX

PackLoss = Callable[[nn.Module, Any], torch.Tensor]
"""`loss(model, batch)`: a scalar with a graph; the model is to be called once, as `model(...)`."""


def hf_pack_loss(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    """Cross-entropy of an `hf` batch from a transformers causal model's logits, in float32 at least.

    The model's own loss is not asked for: some models take no `num_items_in_batch` and would give a mean over the
    micro-batch. Auxiliary losses (routers of MoE) are not in it.

    Args:
        batch: of `batch_formats.hf_batch`, on the model's device.
    """
    return token_loss(model(**model_inputs(batch)).logits[0, :-1], batch["labels"][0, 1:], batch)


def token_loss(logits: torch.Tensor, labels: torch.Tensor, batch: dict[str, Any]) -> torch.Tensor:
    """Sum of the cross-entropies of logits [n, V] and the labels [n] under them, in float32 at least, over the label
    tokens of the batch's global batch."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    total = nn.functional.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="sum")
    return total / batch["num_items_in_batch"]


def model_inputs(batch: dict[str, Any]) -> dict[str, Any]:
    """Of an `hf` batch what a transformers model reads to make logits: all but what the loss is made of."""
    return {key: value for key, value in batch.items() if key not in ("labels", "shift_labels", "num_items_in_batch")}
