"""Embedding, head and loss of a vocabulary that is divided over a tensor-parallel group.

Embedding: every rank looks up the words it has, and zeros for others; sums go to the rows' ranks. Head: a block of
normed rows is gathered, every rank computes the logits of its words, and the cross entropy needs three numbers a row
from the group: the largest logit, the sum of exponentials and the target's logit (Shoeybi et al. 2019, §3). Logits of
all words are never on one rank. As without tensor parallelism the head runs in the backward of the last stage, about
`HEAD_ROWS` rows at a time: tp · ceil(HEAD_ROWS / tp).

Price: two transfers of the rows' hidden states and 12 bytes a row and rank (24 in float64).
"""

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from evenload.cost.memory import HEAD_ROWS
from evenload.runtime.hf_model import StageModel
from evenload.runtime.replay import linear_with_known_output
from evenload.runtime.tensor_group import RowExchange, TensorGroup, gather_rows
from evenload.runtime.tensor_weights import tensor_split
from evenload.runtime.weight_products import is_frozen


def embed_own_rows(model: StageModel, token_ids: Tensor, rows: RowExchange) -> Tensor:
    """int64[T] of a pack -> embeddings [n, hidden] of own rows. Collective."""
    embedding = model.embedding
    assert embedding is not None
    local, is_local = _local_words(embedding.weight, token_ids)
    own = rows.sum_scatter(nn.functional.embedding(local, embedding.weight) * is_local[:, None])
    return own if model.embedding_factor is None else own * model.embedding_factor


def add_embedding_gradient(model: StageModel, token_ids: Tensor, grad: Tensor, rows: RowExchange) -> None:
    """Add the gradient [n, hidden] of own rows to `main_grad` of the ranks that have their words. Collective."""
    embedding = model.embedding
    assert embedding is not None
    if is_frozen(embedding.weight):
        return
    if model.embedding_factor is not None:
        grad = grad * model.embedding_factor
    everyone = rows.gather(grad)
    local, is_local = _local_words(embedding.weight, token_ids)
    if embedding.padding_idx is not None:
        is_local = is_local & (token_ids != embedding.padding_idx)
    total: Tensor = embedding.weight.main_grad  # type: ignore[attr-defined]
    total.index_add_(0, local, everyone.to(total.dtype) * is_local[:, None])


def divided_head(
    model: StageModel, hidden: Tensor, targets: Tensor, num_label_tokens: int, group: TensorGroup, owners: np.ndarray
) -> tuple[Tensor, Tensor]:
    """Loss and gradient of the final hidden states [n, hidden] of own rows. Collective.

    Args:
        targets: int64[T] of all rows of the pack.
        owners: int64[T], the rank that has each row.

    Returns:
        Gradient [n, hidden], and the pack's share of the global mean loss (fp64 scalar), the same on every rank.
    """
    norm, head = model.norm, model.head
    assert norm is not None
    assert head is not None
    block = -(-HEAD_ROWS // group.shard.size)
    # Rows of each rank in pack order; block k has rows [k·block, (k + 1)·block) of every rank.
    rows_of_rank = [np.flatnonzero(owners == rank) for rank in range(group.shard.size)]
    grads, total = [hidden.new_zeros(0, hidden.shape[1])], hidden.new_zeros((), dtype=torch.float64)
    for first in range(0, max(map(len, rows_of_rank)), block):
        in_block = [rows[first : first + block] for rows in rows_of_rank]
        block_owners = np.repeat(np.arange(group.shard.size), [len(rows) for rows in in_block])
        exchange = RowExchange(group, block_owners, hidden.device, "normed rows of the head")
        block_targets = targets[torch.from_numpy(np.concatenate(in_block)).to(targets.device)]
        own = hidden[first : first + block].detach().requires_grad_()
        with torch.enable_grad():
            normed = gather_rows(norm(own), exchange)
            with torch.no_grad():
                logits = nn.functional.linear(normed, head.weight, head.bias)
            logits = model.cap_logits(linear_with_known_output(normed, head.weight, head.bias, logits))
            exact = logits if logits.dtype == torch.float64 else logits.float()
            local, is_local = _local_words(head.weight, block_targets)
            # A batch without any label has a zero loss and zero gradients, not 0/0.
            scale = 1.0 / max(1, num_label_tokens)
            loss = _DividedCrossEntropy.apply(exact, (local, is_local, block_targets >= 0, scale), group)
        loss.backward()  # type: ignore[union-attr]
        assert own.grad is not None
        grads.append(own.grad)
        total += loss.detach().double()  # type: ignore[union-attr]
    return torch.cat(grads), total


def _local_words(weight: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
    """Row of each word in this rank's part, and whether it is there (else the row is 0)."""
    split = tensor_split(weight)
    assert split is not None
    is_local = (words >= split.start) & (words < split.start + split.size)
    return torch.where(is_local, words - split.start, 0), is_local


class _DividedCrossEntropy(torch.autograd.Function):
    """Sum of cross entropies of rows, scaled; logits [R, words of this rank]."""

    @staticmethod
    def forward(ctx, logits: Tensor, targets: tuple[Tensor, Tensor, Tensor, float], group: TensorGroup) -> Tensor:
        local, is_local, has_label, scale = targets
        largest = group.all_reduce(logits.amax(1), "the largest logits", dist.ReduceOp.MAX)
        exponentials = (logits - largest[:, None]).exp_()
        at_target = torch.where(is_local, logits.gather(1, local[:, None])[:, 0], 0)
        sums = group.all_reduce(torch.stack([exponentials.sum(1), at_target]), "the sums of exponentials")
        losses = sums[0].log() + largest - sums[1]
        # Backward runs once, so it may write its result here; a saved tensor would have to be copied.
        ctx.probabilities, ctx.targets = exponentials.div_(sums[0][:, None]), targets
        return torch.where(has_label, losses, 0).sum() * scale

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        local, is_local, has_label, scale = ctx.targets
        logits_grad: Tensor = ctx.probabilities
        logits_grad.scatter_add_(1, local[:, None], -is_local[:, None].to(logits_grad.dtype))
        return logits_grad.mul_((has_label * (scale * grad))[:, None]), None, None
