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
from evenload.runtime.comm.tensor_group import RowExchange, TensorGroup
from evenload.runtime.model.hf_model import StageModel
from evenload.runtime.model.tensor_weights import tensor_split
from evenload.runtime.replay.known_output import known_output
from evenload.runtime.replay.linear import linear_with_known_output
from evenload.runtime.replay.tensor_parallel import gather_rows
from evenload.runtime.replay.weight_products import is_frozen


def embed(model: StageModel, token_ids: Tensor, rows: RowExchange | None) -> Tensor:
    """int64[T] of a pack -> embeddings of own rows, [n, hidden]; collective where `rows` says that the vocabulary is
    divided over a group."""
    embedding = model.embedding
    assert embedding is not None
    if rows is None:
        return embedding(token_ids)
    local, is_local = _local_words(embedding.weight, token_ids)
    own = rows.sum_scatter(nn.functional.embedding(local, embedding.weight) * is_local[:, None])
    return own if model.embedding_factor is None else own * model.embedding_factor


def add_embedding_gradient(model: StageModel, token_ids: Tensor, grad: Tensor, rows: RowExchange | None) -> None:
    """Add the gradient [n, hidden] of own rows to `main_grad`, with `rows` of the ranks that have their words."""
    embedding = model.embedding
    assert embedding is not None
    if is_frozen(embedding.weight):
        return
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
            words = _local_words(head.weight, block_targets)
            # A batch without any label has a zero loss and zero gradients, not 0/0.
            scale = 1.0 / max(1, num_label_tokens)
            loss = _divided_cross_entropy(exact, words, block_targets >= 0, scale, group)
        loss.backward()
        assert own.grad is not None
        grads.append(own.grad)
        total += loss.detach().double()
    return torch.cat(grads), total


def _local_words(weight: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
    """Row of each token id in this rank's part, and whether it is there (else the row is 0)."""
    split = tensor_split(weight)
    assert split is not None
    is_local = (words >= split.start) & (words < split.start + split.size)
    return torch.where(is_local, words - split.start, 0), is_local


def _divided_cross_entropy(
    logits: Tensor, words: tuple[Tensor, Tensor], has_label: Tensor, scale: float, group: TensorGroup
) -> Tensor:
    """Sum of cross entropies of rows, scaled; logits [R, words of this rank]. Collective.

    Args:
        words: of the targets, as `_local_words` gives them.
    """
    local, is_local = words
    rows = logits.detach()
    largest = group.all_reduce(rows.amax(1), "the largest logits", dist.ReduceOp.MAX)
    exponentials = (rows - largest[:, None]).exp_()
    at_target = torch.where(is_local, rows.gather(1, local[:, None])[:, 0], 0)
    sums = group.all_reduce(torch.stack([exponentials.sum(1), at_target]), "the sums of exponentials")
    losses = sums[0].log() + largest - sums[1]
    probabilities = exponentials.div_(sums[0][:, None])

    def backward(grad: Tensor) -> Tensor:
        # In place: backward runs once.
        probabilities.scatter_add_(1, local[:, None], -is_local[:, None].to(probabilities.dtype))
        return probabilities.mul_((has_label * (scale * grad))[:, None])

    return known_output(torch.where(has_label, losses, 0).sum() * scale, backward, logits)
