"""What one part more costs in which keys and values of a shared pack travel: its launches, copies and smaller kernels.

A layer's attention of a document of which this rank has half, forward and backward, with nobody to meet: what would
travel is there at once. In `_PARTS` parts and in one; the difference is theirs. Price: some 20 ms.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from evenload.attention.range_attention import Scoring
from evenload.calibrate.repeats import median_seconds
from evenload.runtime.comm.cp_groups import ContextGroup
from evenload.runtime.replay.context_attention import AttentionCall, GatherAttention
from evenload.runtime.replay.stage import PipelineStage
from evenload.runtime.replay.store import ActivationStore
from evenload.stepplan.rank_rows import shared_documents

_ROWS = 256
_PARTS = 4


@dataclass(frozen=True, eq=False)
class _There:
    """A transfer that is over."""

    result: Tensor
    sent: Tensor

    def wait(self) -> Tensor:
        return self.result


class _Alone:
    """In the place of a group of two: nothing travels, and half of what a rank gets is zero."""

    rank, size = 0, 2

    def all_gather(self, rows: Tensor, what: str, *, in_queue: bool) -> _There:
        return _There(rows.new_zeros((2 * rows.shape[0], *rows.shape[1:])), rows)

    def reduce_scatter(self, rows: Tensor, what: str, *, in_queue: bool) -> _There:
        return _There(rows[: rows.shape[0] // 2], rows)


def part_seconds(stage: PipelineStage) -> tuple[float, float]:
    """Of every part but the first, on one layer, forward and backward; 0 where this rank has one key head."""
    layer = min(stage.model.layers)
    parts = min(_PARTS, stage.model.attention_heads(layer)[1])
    if parts == 1:
        return 0.0, 0.0
    (one_forward, one_backward), (forward, backward) = (_passes(stage, layer, count) for count in (1, parts))
    device = stage.device
    return tuple(  # type: ignore[return-value]
        max(0.0, median_seconds(many, device) - median_seconds(one, device)) / (parts - 1)
        for many, one in ((forward, one_forward), (backward, one_backward))
    )


def _passes(stage: PipelineStage, layer: int, parts: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """A forward and a backward of attention in so many parts."""
    heads, kv_heads, dim = stage.model.attention_heads(layer)
    rows = shared_documents([2 * _ROWS], 2)
    attention = GatherAttention(rows, cast("ContextGroup", cast("Any", _Alone())), "calibration", stage.device, parts)
    like = torch.randn(_ROWS, heads, dim, device=stage.device, dtype=stage.dtype)
    keys = torch.randn(_ROWS, kv_heads, dim, device=stage.device, dtype=stage.dtype)
    call = AttentionCall(stage.backend, ActivationStore({0: _ROWS}, [rows.ranges(0)]), layer, Scoring(dim**-0.5))

    @torch.no_grad()
    def forward() -> tuple[Tensor, Tensor]:
        return attention.forward(call, like, keys, keys)

    out, lse = forward()

    @torch.no_grad()
    def backward() -> None:
        attention.backward(call, like, like, out, lse)

    return forward, backward
