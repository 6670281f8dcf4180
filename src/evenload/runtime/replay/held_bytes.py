"""`HeldBytes` counts what one rank holds for coming backwards, by kind, where it is allocated and freed.

`cost/memory.py` predicts the same kinds by the same rules. Temporary tensors inside a layer are not counted.
"""

from typing import Literal, get_args

import torch
from torch import Tensor

StoreKind = Literal[
    "activations_replay",
    "activations_recompute",
    "activations_offload",
    "keys_and_values",
    "key_value_gradients",
    "states",
    "weight_gradient_inputs",
    "offload_buffers",
]
"""Recorded tensors by activation policy of their document, keys and values of documents, their accumulated gradients,
states of documents at cuts or their gradients, what an I leaves for its W, and offloaded tensors that are on the device
for the running pack."""
STORE_KINDS: tuple[StoreKind, ...] = get_args(StoreKind)


def own_memory(rows: Tensor) -> Tensor:
    """Return the tensor, or a copy where it is a part of a larger one, so that what is counted is what is held."""
    if rows.untyped_storage().nbytes() == rows.nbytes:
        return rows
    return rows.clone(memory_format=torch.contiguous_format)


class HeldBytes:
    """Counts bytes held now and at most, on the device and in host memory; peaks of kinds are at different times."""

    def __init__(self) -> None:
        self.held_bytes = self.peak_bytes = self.host_bytes = self.peak_host_bytes = 0
        self.held_by_kind: dict[StoreKind, int] = dict.fromkeys(STORE_KINDS, 0)
        self.peak_by_kind = dict(self.held_by_kind)

    def count(self, kind: StoreKind, num_bytes: int) -> None:
        self.held_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        self.held_by_kind[kind] += num_bytes
        self.peak_by_kind[kind] = max(self.peak_by_kind[kind], self.held_by_kind[kind])

    def count_host(self, num_bytes: int) -> None:
        self.host_bytes += num_bytes
        self.peak_host_bytes = max(self.peak_host_bytes, self.host_bytes)
