"""Cross-entropy and its gradient by hand, in the memory that the cost model charges.

`torch.nn.functional.cross_entropy` under autograd keeps probabilities beside the fp32 logits and makes the gradient in
both precisions: 16 bytes a logit measured in fp32, where `cost.memory` charges e + 8. Here the fp32 copy of the logits
becomes the gradient in place, and one temporary of the same size is there while the log-sum-exp is summed. Targets of
-100 carry no loss.
"""

import torch
from torch import Tensor

from evenload.attention.range_attention import work_dtype


@torch.no_grad()
def cross_entropy_and_gradient(logits: Tensor, targets: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Scaled sum of the losses of rows with a target.

    Args:
        logits: [T, vocab]; targets: int64[T], -100 = no loss.
        scale: of loss and gradient.

    Returns:
        Loss (fp64 scalar on the device), and gradient [T, vocab] in the precision of the logits, computed in fp32
        (fp64 for fp64).
    """
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
