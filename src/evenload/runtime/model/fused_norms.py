"""Root-mean-square norms as one kernel of torch in place of transformers' eight.

`torch.nn.functional.rms_norm` has a fused kernel for GPUs, forward and backward; transformers' modules cast, square,
average, add, take the root, scale, cast and weigh one after the other, each a pass over the pack. A layer of Llama
launches 14 kernels fewer in forward, more in backward, and what lies between them is not written to memory.

Equal but for rounding: transformers rounds the normalised row to the compute precision before it is weighed, and norms
of float64 models in float32; here a result is rounded once. So it is on where it pays, on GPUs, and can be left out
(`train.fused_norms`). On CPUs torch does the same steps as transformers.

Gemma's norms weigh by 1 + weight in float32 and stay as they are.
"""

from collections.abc import Iterable

from torch import Tensor, nn

from evenload.types.architectures.architecture import Architecture


class FusedNorm(nn.Module):
    """Mixed into transformers' norm by changing the class of the model's own module."""

    weight: nn.Parameter
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., n] -> [..., n]."""
        return nn.functional.rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)


def fuse_norms(modules: Iterable[nn.Module | None], architecture: Architecture) -> int:
    """Turn the norms inside of modules, as far as there are any, into fused ones, in place; how many were not yet."""
    if not architecture.plain_norms:
        return 0
    count = 0
    for norm in (inner for module in modules if module is not None for inner in module.modules()):
        own = type(norm)
        if own.__name__ == f"{architecture.classes}RMSNorm":
            norm.__class__ = type(f"Fused{own.__name__}", (FusedNorm, own), {})
            count += 1
    return count
