"""Collectives over one tensor for all ranks, by the name that the installed torch has for them.

torch 2.13 calls `all_gather_single` and `reduce_scatter_single` what 2.11 and 2.12 call `all_gather_into_tensor` and
`reduce_scatter_tensor`, with the same arguments.
"""

from typing import Any

import torch.distributed as dist

_torch: Any = dist
all_gather_single = getattr(dist, "all_gather_single", None) or _torch.all_gather_into_tensor
"""(output, input, group, async_op): inputs of all ranks, in rank order, one after the other in `output`."""
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or _torch.reduce_scatter_tensor
"""(output, input, op, group, async_op): the rank's own share of the reduced `input`."""
