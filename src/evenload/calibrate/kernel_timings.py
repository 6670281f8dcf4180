"""Seconds of a rank's own kernels besides packs through layers: head, embedding, optimizer, matrix products, attention
by itself, copies of rows.

Each function makes what it needs once and returns work to be timed again and again, by name, so that repeats of
everything can be interleaved.
"""

from collections.abc import Callable, Iterable, Mapping

import numpy as np
import torch

from evenload.attention.range_attention import KeyRange, RangeAttention, Scoring
from evenload.calibrate.repeats import median_seconds
from evenload.cost.flops import slice_pairs
from evenload.runtime.replay.head import add_embedding_gradient, embed
from evenload.runtime.replay.stage import PipelineStage
from evenload.types.model import ModelSpec
from evenload.types.token_range import Range

Work = Mapping[int, Callable[[], object]]
"""Work by its size, such as rows."""

HEAD_ROWS = (16, 64, 256, 512, 1024, 2048)
QUICK_HEAD_ROWS = (64, 512, 2048)
MATMUL_TOKENS = (16, 128, 1024, 4096)
ATTENTION_GRID = (
    *((64, 0), (192, 0), (1024, 0), (1024, 3072), (2048, 0), (4096, 0)),
    # Few rows behind many keys, up to two tiles of most kernels (WLB-LLM Fig. 10).
    *((rows, keys - rows) for keys in (1024, 4096) for rows in (16, 64, 128, 256)),
)
"""(queries, prefix)."""
_OPTIMIZER_PARAMETERS = 1 << 22  # more than caches hold, as in a step
_COPIED_BYTES = 1 << 25


def head_rows(model: ModelSpec, tp: int, most_flops: float) -> list[int]:
    """Rows to time the head with, of at most so many FLOPs; the two smallest in any case."""
    row_flops = 6.0 * model.embedding_parameters / tp
    return [rows for rows in HEAD_ROWS if rows in HEAD_ROWS[:2] or rows * row_flops <= most_flops]


def head_work(stage: PipelineStage, vocab_size: int, rows: Iterable[int] = QUICK_HEAD_ROWS) -> Work:
    """Final norm, logits, loss and their gradient, by rows. Last stage only."""

    def of(rows: int) -> Callable[[], object]:
        ranges = (Range(0, 0, rows),)
        hidden = torch.randn(stage.num_rows(ranges), stage.hidden_size, dtype=stage.dtype, device=stage.device)
        targets = torch.randint(0, vocab_size, (rows,), device=stage.device)
        return lambda: stage.head(hidden, targets, 1, ranges)

    return {count: of(count) for count in rows}


def embedding_work(stage: PipelineStage, vocab_size: int, rows: int) -> Callable[[], object]:
    """Rows of the embedding and the sum of their gradients, of so many tokens. First stage without tensor parallelism
    only."""
    token_ids, table = torch.randint(0, vocab_size, (rows,), device=stage.device), stage.model.positions
    positions = torch.arange(rows, device=stage.device) % (rows if table is None else table.num_embeddings)
    grad = torch.randn(rows, stage.hidden_size, dtype=stage.dtype, device=stage.device)

    @torch.no_grad()
    def work() -> None:
        embed(stage.model, token_ids, positions, None)
        add_embedding_gradient(stage.model, token_ids, positions, grad, None)

    return work


def matmul_flops_per_s(device: torch.device, dtype: torch.dtype) -> float:
    """The best that matrix products reach, which MFU is a share of."""
    # A GPU is judged by the precision it computes in, and is busy only with large matrices.
    n, dtype = (8192, dtype) if device.type == "cuda" else (1024, torch.float32)
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    return 2.0 * n**3 / median_seconds(lambda: a @ b, device)


def matmul_token_flops(model: ModelSpec, tp: int) -> float:
    """Of the product with the widest matrix of a layer, on one rank."""
    return 2.0 * _widest(model, tp) * model.hidden_size


def _widest(model: ModelSpec, tp: int) -> int:
    return max(1, model.ffn_hidden_size // tp)


def matmul_work(model: ModelSpec, tp: int, device: torch.device, dtype: torch.dtype, most_flops: float) -> Work:
    """A product with the widest matrix of a layer, by tokens.

    Args:
        most_flops: of a product; the smallest is timed in any case.
    """
    weight = torch.randn(_widest(model, tp), model.hidden_size, device=device, dtype=dtype)

    def of(tokens: int) -> Callable[[], object]:
        rows = torch.randn(tokens, model.hidden_size, device=device, dtype=dtype)
        return lambda: torch.nn.functional.linear(rows, weight)

    sizes = [n for n in MATMUL_TOKENS if n == MATMUL_TOKENS[0] or n * matmul_token_flops(model, tp) <= most_flops]
    return {tokens: of(tokens) for tokens in sizes}


def attention_flops(model: ModelSpec, tp: int, rows: int, prefix: int) -> float:
    """Of the forward of so many queries behind a prefix, on one rank; a backward has 2.5 times as many."""
    start = np.array([prefix], np.int64)
    pairs = float(slice_pairs(start, start + rows, 0).sum())
    return 4.0 * (model.num_heads // tp) * model.head_dim * pairs


class AttentionWork:
    """Attention of one document's rows behind a prefix, with the backend of the layers.

    Args:
        rows, prefix: queries, and keys before them.
        heads, kv_heads: of this rank.
    """

    def __init__(
        self, backend: RangeAttention, rows: int, prefix: int, heads: int, kv_heads: int, head_dim: int,
        device: torch.device, dtype: torch.dtype,
    ) -> None:  # fmt: skip
        self._backend, self._scoring = backend, Scoring(head_dim**-0.5)
        self._q = torch.randn(rows, heads, head_dim, device=device, dtype=dtype)
        k, v = (torch.randn(prefix + rows, kv_heads, head_dim, device=device, dtype=dtype) for _ in range(2))
        self._ranges = (KeyRange(slice(0, rows), k, v),)
        self._out, self._lse = backend.forward(self._q, self._ranges, self._scoring)

    @torch.no_grad()
    def forward(self) -> None:
        self._backend.forward(self._q, self._ranges, self._scoring)

    @torch.no_grad()
    def backward(self) -> None:
        for _ in self._backend.backward(self._out, self._q, self._ranges, self._out, self._lse, self._scoring):
            pass


def optimizer_work(data_size: int, device: torch.device) -> tuple[Callable[[], object], int]:
    """All that a step does to gradients and weights between transfers: zeroes the gradients of all ranks' shards, sums
    squares, clips, updates, copies what it sends. And the parameters of this rank's shard."""
    count = _OPTIMIZER_PARAMETERS
    gradients = torch.zeros(data_size * count, device=device)
    parameter, shard = torch.zeros(count, device=device), gradients[:count]
    parameter.grad = shard
    adamw = torch.optim.AdamW([parameter], fused=True)

    def update() -> None:
        gradients.zero_()
        torch.linalg.vector_norm(shard, dtype=torch.float64)
        shard.mul_(0.5)
        adamw.step()
        parameter.clone()

    return update, count


def copy_work(model: ModelSpec, tp: int, device: torch.device, dtype: torch.dtype) -> tuple[Callable[[], object], int]:
    """Rows of keys and values put in place by an index, as gathered ones are; and the bytes that are copied."""
    width = 2 * max(1, model.num_kv_heads // tp) * model.head_dim
    rows = max(1, _COPIED_BYTES // (width * dtype.itemsize))
    gathered = torch.randn(rows, width, device=device, dtype=dtype)
    # The two halves change places: every byte is read and written once.
    places = torch.arange(rows, device=device).roll(rows // 2)
    return lambda: gathered[places], rows * width * dtype.itemsize
