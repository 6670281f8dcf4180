"""Compute embedding, head and loss, also of a vocabulary that is divided over a tensor-parallel group.

The head runs in the backward of the last stage, about `HEAD_ROWS` rows at a time. The exponentials of the logits become
the gradient in place: e + 8 bytes a logit, where torch's cross entropy under autograd takes 16 in fp32. Liger's kernel
makes it of the logits themselves: e bytes a logit (`StageModel.liger`), where the vocabulary is not divided.

Divided over a group, every rank embeds the token ids it has, and zeros for others. The cross entropy needs three
numbers a row from the group: the largest logit, the sum of exponentials and the target's logit (Shoeybi et al. 2019,
§3). Price: two transfers of the rows' hidden states and 12 bytes a row and rank (24 in float64).
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from evenload.attention.range_attention import work_dtype
from evenload.cost.memory import HEAD_ROWS
from evenload.feed.collate import LabelEdges
from evenload.runtime.comm.tensor_group import RowExchange, TensorGroup, row_owners
from evenload.runtime.device import to_device
from evenload.runtime.model.hf_model import StageModel
from evenload.runtime.model.liger import cross_entropy
from evenload.runtime.model.tensor_weights import tensor_split
from evenload.runtime.replay.replayable import linear_with_known_output
from evenload.runtime.replay.tensor_parallel import gather_rows
from evenload.runtime.replay.weight_products import is_frozen, known_output
from evenload.types.document import Range


class Around(TorchFunctionMode):
    """Computes look-ups in the tables of a prologue, and the head's product, while the model's own code runs around its
    layers: their gradients go into `main_grad`, and both may be divided over a group.

    Args:
        rows: exchange of own rows with the ranks that hold other token ids; None = this rank holds all.
    """

    def __init__(self, model: StageModel, rows: RowExchange | None) -> None:
        super().__init__()
        self._rows = rows
        self._tables = {id(one.weight) for one in model.prologue.values() if isinstance(one, nn.Embedding)}
        self._head = id(model.head.weight) if model.is_last else 0
        self.product: Tensor | None = None
        """The head's, the last one."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.embedding and id(args[1]) in self._tables:
            return self._look_up(args[0], args[1], kwargs.get("padding_idx"))
        if func is nn.functional.linear and id(args[1]) == self._head:
            return self._multiply(*args, **kwargs)
        return func(*args, **kwargs)

    def _look_up(self, ids: Tensor, table: Tensor, padding: int | None) -> Tensor:
        """int64[1, T] -> [1, n, hidden] of own rows."""
        rows, first = self._rows, _first_id(table)
        local, is_local = _local_ids(ids[0], first, table.shape[0])
        if rows is not None and torch.is_grad_enabled():
            # Of a model that is cut no backward reads it (`structure`), so nothing is sent.
            output = table.new_zeros(()).expand(rows.num_own, table.shape[1])
        else:
            with torch.no_grad():
                output = nn.functional.embedding(local, table)
                output = output if rows is None else rows.sum_scatter(output * is_local[:, None])
        if is_frozen(table) or not torch.is_grad_enabled():
            return output[None]

        def backward(grad: Tensor) -> Tensor:
            own = grad[0] if rows is None else rows.gather(grad[0])
            is_left_out = ~is_local | (ids[0] == (-1 if padding is None else padding))
            total: Tensor = table.main_grad  # type: ignore[attr-defined]
            total.index_add_(0, local, own.to(total.dtype).masked_fill(is_left_out[:, None], 0))
            return torch.zeros_like(anchor)

        # Autograd needs something to go back to.
        anchor = output.new_zeros(()).requires_grad_()
        return known_output(output[None], backward, anchor).clone()  # models change it in place

    def _multiply(self, normed: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """[1, n, hidden] of own rows -> [1, T, token ids of this rank]."""
        rows = normed[0] if self._rows is None else gather_rows(normed[0], self._rows)
        with torch.no_grad():
            self.product = nn.functional.linear(rows, weight, bias)
        return linear_with_known_output(rows, weight, bias, self.product)[None]


def head_blocks(
    targets: Tensor, owners: NDArray[np.int64] | None, group: TensorGroup | None
) -> Iterator[tuple[slice, RowExchange | None, slice | Tensor]]:
    """Yield blocks of rows with targets: own rows, their exchange, and the rows that all ranks have in the block;
    `owners` are the ranks of a group that have each row."""
    if group is None or owners is None:
        for start in range(0, len(targets), HEAD_ROWS):
            block = slice(start, start + HEAD_ROWS)
            yield block, None, block
        return
    size = group.shard.size
    num_own = -(-HEAD_ROWS // size)
    # Rows of each rank in pack order; block k has rows [k·num_own, (k + 1)·num_own) of every rank.
    rows_of_rank = [np.flatnonzero(owners == rank) for rank in range(size)]
    for first in range(0, max(map(len, rows_of_rank)), num_own):
        in_block = [rows[first : first + num_own] for rows in rows_of_rank]
        block_owners = np.repeat(np.arange(size), [len(rows) for rows in in_block])
        exchange = RowExchange(group, block_owners, targets.device, "normed rows of the head")
        chosen = to_device(torch.from_numpy(np.concatenate(in_block)), targets.device)
        yield slice(first, first + num_own), exchange, chosen


def head_gradient(
    model: StageModel,
    hidden: Tensor,
    targets: Tensor,
    num_label_tokens: int,
    ranges: tuple[Range, ...],
    group: TensorGroup | None,
    edges: LabelEdges | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the gradient [n, hidden] of own rows' final hidden states, and the pack's loss (fp64 scalar, the same on
    all ranks of `group`); add to the `main_grad` of final norm and head. Collective with a group.

    Args:
        targets: int64[T] of the pack, -100 = no loss.
        num_label_tokens: of the whole global batch, the loss's denominator.
        edges: what a pack with trees predicts, in place of targets; only rows that predict reach the vocabulary, each
            as often as it has targets.
    """
    owners = None if group is None else row_owners(ranges, group.shard.size)
    if edges is None:
        return _gradient(model, hidden, targets, num_label_tokens, owners, group)
    rows, owners = _rows_of_edges(edges, owners, group)
    rows, targets, counts = (to_device(torch.from_numpy(one), hidden.device) for one in (rows, *edges[1:]))
    grads, loss = _gradient(model, hidden[rows], targets, num_label_tokens, owners, group, counts)
    total = torch.zeros_like(hidden, dtype=work_dtype(hidden)).index_add_(0, rows, grads.to(work_dtype(hidden)))
    return total.to(hidden.dtype), loss


def _rows_of_edges(
    edges: LabelEdges, owners: NDArray[np.int64] | None, group: TensorGroup | None
) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
    """Return, of the edges whose row this rank has, that row among its own, int64[n]; and who has each edge's row."""
    if group is None or owners is None:
        return edges.rows, None
    of_edges, rank = owners[edges.rows], group.shard.rank
    among_own = np.cumsum(owners == rank) - 1
    return among_own[edges.rows[of_edges == rank]], of_edges


def _gradient(
    model: StageModel,
    hidden: Tensor,
    targets: Tensor,
    num_label_tokens: int,
    owners: NDArray[np.int64] | None,
    group: TensorGroup | None,
    counts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return as `head_gradient`; `counts`, int64[T]: how often each row's loss counts, None = once."""
    grads, total = [hidden.new_zeros(0, hidden.shape[1])], hidden.new_zeros((), dtype=torch.float64)
    # A batch without any label has a zero loss and zero gradients, not 0/0.
    num_labels = max(1, num_label_tokens)
    for own, exchange, block in head_blocks(targets, owners, group):
        rows = hidden[own].detach().requires_grad_()
        times = None if counts is None else counts[block]
        with torch.enable_grad(), Around(model, exchange) as around:
            logits = model.logits(rows)
        if _in_kernel(model):
            # The kernel makes the gradient in the logits, which a cap or a factor behind the product still needs. It
            # writes behind autograd's back, as does what counts several times: `data` has a version of its own.
            grad = logits.data
            assert around.product is not None
            grad = grad if grad.data_ptr() == around.product.data_ptr() else grad.clone()
            losses = cross_entropy(grad, targets[block], float(num_labels), trains=True)
            if times is not None:
                grad.mul_(times[:, None])
                losses = losses * times
            loss = losses.sum(dtype=torch.float64)
        else:
            first_id = _first_id(model.head.weight)
            loss, grad = cross_entropy_and_gradient(logits, targets[block], 1 / num_labels, first_id, group, times)
        logits.backward(grad)
        assert rows.grad is not None
        grads.append(rows.grad)
        total += loss
    return torch.cat(grads), total


def _in_kernel(model: StageModel) -> bool:
    return "cross-entropy" in model.liger


def _first_id(weight: Tensor) -> int:
    split = tensor_split(weight)
    return 0 if split is None else split.ranges[0][0]


def _local_ids(token_ids: Tensor, first: int, size: int) -> tuple[Tensor, Tensor]:
    """Return the row of each token id in `[first, first + size)`, and whether it is there (else the row is 0)."""
    is_local = (token_ids >= first) & (token_ids < first + size)
    return torch.where(is_local, token_ids - first, 0), is_local


@torch.no_grad()
def cross_entropy_and_gradient(
    logits: Tensor,
    targets: Tensor,
    scale: float,
    first_id: int = 0,
    group: TensorGroup | None = None,
    counts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the scaled sum of the losses of rows with a target (fp64 scalar, the same on all ranks), and its gradient
    in the precision of the logits, computed in fp32 (fp64 for fp64). Collective with a group.

    Args:
        logits: [T, token ids of this rank, from `first_id` on]; targets: int64[T], -100 = no loss.
        counts: int64[T], how often each row's loss counts; None = once.
    """
    losses, exponentials, sums, local, is_local = _losses(logits, targets, first_id, group)
    weights = (targets >= 0).to(losses.dtype) * scale
    weights = weights if counts is None else weights * counts
    loss = (losses * weights).sum(dtype=torch.float64)
    gradient = exponentials.div_(sums[:, None])
    gradient.scatter_add_(1, local[:, None], -is_local[:, None].to(gradient.dtype))
    return loss, gradient.mul_(weights[:, None]).to(logits.dtype)


@torch.no_grad()
def row_losses(
    model: StageModel,
    hidden: Tensor,
    targets: Tensor,
    ranges: tuple[Range, ...],
    group: TensorGroup | None,
    edges: LabelEdges | None = None,
) -> Tensor:
    """Return the loss of every row of a pack, [T] in fp32 (fp64), 0 without a target, on all ranks of `group`; with
    edges the sum of a row's, each as often as it counts. `hidden` [n, hidden] are own rows' final states. Collective
    with a group."""
    owners = None if group is None else row_owners(ranges, group.shard.size)
    if edges is None:
        return _losses_of_rows(model, hidden, targets, owners, group)
    own, owners = _rows_of_edges(edges, owners, group)
    own, rows, of_edges, counts = (to_device(torch.from_numpy(one), hidden.device) for one in (own, *edges))
    losses = _losses_of_rows(model, hidden[own], of_edges, owners, group)
    return losses.new_zeros(len(targets)).index_add_(0, rows, losses * counts)


def _losses_of_rows(
    model: StageModel, hidden: Tensor, targets: Tensor, owners: NDArray[np.int64] | None, group: TensorGroup | None
) -> Tensor:
    losses = hidden.new_zeros(len(targets), dtype=work_dtype(hidden))
    for own, exchange, block in head_blocks(targets, owners, group):
        with Around(model, exchange):
            logits = model.logits(hidden[own])
        if _in_kernel(model):
            losses[block] = cross_entropy(logits.clone(), targets[block], 1.0, trains=False)
            continue
        of_block = _losses(logits, targets[block], _first_id(model.head.weight), group)[0]
        losses[block] = torch.where(targets[block] >= 0, of_block, 0)
    return losses


def _losses(
    logits: Tensor, targets: Tensor, first_id: int, group: TensorGroup | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return, of logits [R, ids of this rank]: losses [R], meaningless without a target; exponentials [R, ids], their
    sums over all ids [R]; the target's column in this rank's part, and whether it is there. Collective with a group."""
    local, is_local = _local_ids(targets, first_id, logits.shape[1])
    rows = logits.detach().to(work_dtype(logits), copy=True)
    largest = rows.amax(1)
    if group is not None:
        group.all_reduce(largest, "the largest logits", dist.ReduceOp.MAX)
    exponentials = (rows - largest[:, None]).exp_()
    at_target = torch.where(is_local, rows.gather(1, local[:, None])[:, 0], 0)
    sums = torch.stack([exponentials.sum(1), at_target])
    if group is not None:
        group.all_reduce(sums, "the sums of exponentials")
    return sums[0].log() + largest - sums[1], exponentials, sums[0], local, is_local
