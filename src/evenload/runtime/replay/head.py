"""Embedding, head and loss, also of a vocabulary that is divided over a tensor-parallel group.

Loss: the fp32 copy of the logits becomes the gradient in place, where `torch.nn.functional.cross_entropy` under
autograd keeps probabilities as well (16 bytes a logit in fp32, here e + 8). Targets of -100 carry no loss.

Divided over a group. Embedding: every rank looks up the words it has, and zeros for others; sums go to the rows' ranks.
Head: a block of normed rows is gathered, every rank computes the logits of its words, and the cross entropy needs three
numbers a row from the group: the largest logit, the sum of exponentials and the target's logit (Shoeybi et al. 2019,
§3). The head runs in the backward of the last stage, about `HEAD_ROWS` rows at a time.

Price: two transfers of the rows' hidden states and 12 bytes a row and rank (24 in float64).
"""

from collections.abc import Iterator

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from evenload.attention.range_attention import work_dtype
from evenload.cost.memory import HEAD_ROWS
from evenload.runtime.comm.tensor_group import RowExchange, TensorGroup, row_owners
from evenload.runtime.device import to_device
from evenload.runtime.model.hf_model import StageModel
from evenload.runtime.model.tensor_weights import tensor_split
from evenload.runtime.replay.replayable import linear_with_known_output
from evenload.runtime.replay.tensor_parallel import gather_rows
from evenload.runtime.replay.weight_products import is_frozen
from evenload.types.document import Range


def embed(model: StageModel, token_ids: Tensor, positions: Tensor, rows: RowExchange | None) -> Tensor:
    """Embeddings [n, hidden] of own rows from tokens and positions int64[T] of a pack; collective where `rows` says
    that the vocabulary is divided over a group."""
    embedding = model.embedding
    assert embedding is not None
    if rows is None:
        words = embedding(token_ids)
        return words if model.positions is None else words + model.positions(positions)
    assert model.positions is None, "tensor parallelism of learned positions was refused"
    local, is_local = _local_words(embedding.weight, token_ids)
    own = rows.sum_scatter(nn.functional.embedding(local, embedding.weight) * is_local[:, None])
    return own if model.embedding_factor is None else own * model.embedding_factor


def add_embedding_gradient(
    model: StageModel, token_ids: Tensor, positions: Tensor, grad: Tensor, rows: RowExchange | None
) -> None:
    """Add the gradient [n, hidden] of own rows to `main_grad`, with `rows` of the ranks that have their words."""
    embedding = model.embedding
    assert embedding is not None
    if is_frozen(embedding.weight):
        return
    if model.positions is not None:
        table: Tensor = model.positions.weight.main_grad  # type: ignore[attr-defined]
        table.index_add_(0, positions, grad.to(table.dtype))
    if model.embedding_factor is not None:
        grad = grad * model.embedding_factor
    padding = -1 if embedding.padding_idx is None else embedding.padding_idx
    local, is_left_out = token_ids, token_ids == padding
    if rows is not None:
        grad = rows.gather(grad)
        local, is_local = _local_words(embedding.weight, token_ids)
        is_left_out = ~is_local | is_left_out
    total: Tensor = embedding.weight.main_grad  # type: ignore[attr-defined]
    total.index_add_(0, local, grad.to(total.dtype).masked_fill(is_left_out[:, None], 0))


def head_blocks(
    targets: Tensor, ranges: tuple[Range, ...], group: TensorGroup | None
) -> Iterator[tuple[slice, RowExchange | None, slice | Tensor]]:
    """The rows of a pack as the head takes them, block by block: own rows, how they and those of other ranks come
    together, and which of the pack's rows all of them are."""
    if group is None:
        for start in range(0, len(targets), HEAD_ROWS):
            block = slice(start, start + HEAD_ROWS)
            yield block, None, block
        return
    size, owners = group.shard.size, row_owners(ranges, group.shard.size)
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
) -> tuple[Tensor, Tensor]:
    """Gradient [n, hidden] of the final hidden states of own rows, and the pack's loss (fp64 scalar); adds to the
    `main_grad` of final norm and head. Collective with a group, of which every rank then knows the loss.

    Args:
        targets: int64[T] of the pack, -100 = no loss.
        num_label_tokens: of the whole global batch, the loss's denominator.
    """
    norm, head = model.norm, model.head
    assert norm is not None
    assert head is not None
    grads, total = [hidden.new_zeros(0, hidden.shape[1])], hidden.new_zeros((), dtype=torch.float64)
    # A batch without any label has a zero loss and zero gradients, not 0/0.
    scale = 1 / max(1, num_label_tokens)
    for own, exchange, block in head_blocks(targets, ranges, group):
        block_targets = targets[block]
        rows = hidden[own].detach().requires_grad_()
        with torch.enable_grad():
            normed = norm(rows) if exchange is None else gather_rows(norm(rows), exchange)
            with torch.no_grad():
                logits = nn.functional.linear(normed, head.weight, head.bias)
            logits = model.cap_logits(linear_with_known_output(normed, head.weight, head.bias, logits))
        if group is None:
            loss, grad = cross_entropy_and_gradient(logits, block_targets, scale)
        else:
            loss, grad = divided_cross_entropy(logits, head.weight, block_targets, scale, group)
        logits.backward(grad)
        assert rows.grad is not None
        grads.append(rows.grad)
        total += loss
    return torch.cat(grads), total


def _local_words(weight: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
    """Row of each token id in this rank's part, and whether it is there (else the row is 0)."""
    split = tensor_split(weight)
    assert split is not None
    is_local = (words >= split.start) & (words < split.start + split.size)
    return torch.where(is_local, words - split.start, 0), is_local


@torch.no_grad()
def cross_entropy_and_gradient(logits: Tensor, targets: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Scaled sum of the losses of rows with a target (fp64 scalar), and its gradient [T, vocab] in the precision of the
    logits, computed in fp32 (fp64 for fp64). `targets` int64[T], -100 = no loss."""
    work = work_dtype(logits)
    exact = logits.detach().to(work, copy=True)
    labelled = targets >= 0
    words = targets.clamp(min=0)[:, None]
    weights = labelled.to(work) * scale
    lse = torch.logsumexp(exact, dim=-1, keepdim=True)
    losses = (lse - exact.gather(1, words))[:, 0]
    loss = (losses * weights).sum(dtype=torch.float64)
    exact.sub_(lse).exp_()
    exact.scatter_add_(1, words, exact.new_full((), -1.0).expand_as(words))
    return loss, exact.mul_(weights[:, None]).to(logits.dtype)


@torch.no_grad()
def divided_cross_entropy(
    logits: Tensor, weight: Tensor, targets: Tensor, scale: float, group: TensorGroup
) -> tuple[Tensor, Tensor]:
    """As `cross_entropy_and_gradient`, of the logits [R, words of this rank] of a head whose weight is a part.
    Collective; the loss is the same on every rank."""
    has_label = targets >= 0
    losses, exponentials, sums, local, is_local = _divided_losses(logits, weight, targets, group)
    loss = (torch.where(has_label, losses, 0).sum() * scale).double()
    gradient = exponentials.div_(sums[:, None])
    gradient.scatter_add_(1, local[:, None], -is_local[:, None].to(gradient.dtype))
    return loss, gradient.mul_((has_label.to(gradient.dtype) * scale)[:, None]).to(logits.dtype)


@torch.no_grad()
def row_losses(
    model: StageModel, hidden: Tensor, targets: Tensor, ranges: tuple[Range, ...], group: TensorGroup | None
) -> Tensor:
    """The loss of every row of a pack, [T] in fp32 (fp64), 0 without a target; no gradient. `hidden` [n, hidden] are
    own rows' final states. Collective with a group, of which every rank then knows all."""
    norm, head = model.norm, model.head
    assert norm is not None
    assert head is not None
    found = hidden.new_zeros(len(targets), dtype=work_dtype(hidden))
    for own, exchange, block in head_blocks(targets, ranges, group):
        normed = norm(hidden[own]) if exchange is None else exchange.gather(norm(hidden[own]))
        logits = model.cap_logits(nn.functional.linear(normed, head.weight, head.bias))
        words = targets[block]
        if group is None:
            rows = logits.to(work_dtype(logits))
            losses = torch.logsumexp(rows, dim=-1) - rows.gather(1, words.clamp(min=0)[:, None])[:, 0]
        else:
            losses = _divided_losses(logits, head.weight, words, group)[0]
        found[block] = torch.where(words >= 0, losses, 0)
    return found


def _divided_losses(
    logits: Tensor, weight: Tensor, targets: Tensor, group: TensorGroup
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Of logits [R, words of this rank]: losses [R], also without a target; exponentials [R, words], their sums over
    all words [R]; the target's row in this rank's part, and whether it is there. Collective."""
    local, is_local = _local_words(weight, targets)
    rows = logits.detach().to(work_dtype(logits))
    largest = group.all_reduce(rows.amax(1), "the largest logits", dist.ReduceOp.MAX)
    exponentials = (rows - largest[:, None]).exp_()
    at_target = torch.where(is_local, rows.gather(1, local[:, None])[:, 0], 0)
    sums = group.all_reduce(torch.stack([exponentials.sum(1), at_target]), "the sums of exponentials")
    return sums[0].log() + largest - sums[1], exponentials, sums[0], local, is_local
