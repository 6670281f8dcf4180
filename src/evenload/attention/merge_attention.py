"""Attention over a union of key sets, from the attention over each: outputs weighted by their log-sum-exps.

Kept in the log-sum-exp's precision (at least fp32) until the last part is in. Autograd must never run through this;
backward gives every part the merged output and log-sum-exp instead (`range_attention`).
"""

import torch
from torch import Tensor


def merge_into(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Add a part, in place.

    Args:
        out: [n, H, D], lse: [n, H], of the keys so far (0 and -inf = none); both fp32 or fp64.
        part: [n, H, D] in any precision, part_lse: [n, H], of other keys, at least one.
    """
    both = torch.logaddexp(lse, part_lse)
    out.mul_((lse - both).exp().unsqueeze(-1))
    out.addcmul_(part.to(out.dtype), (part_lse - both).exp().unsqueeze(-1))
    lse.copy_(both)
