"""Main memory of a whole training process on a CPU: what a system's monitor shows, and a container limits.

    fixed       interpreter, libraries, process groups, loader: measured by the run itself before its first step
    static      weights, gradients and optimizer state (`cost.memory`), all touched before the first step
    first use   what kernels load when they first run
    step        activations and buffers at their simulated peak, and what the C library's allocator holds beyond it:
                freed tensors below its threshold stay with the process, in pieces that others do not fill
    update      gloo's copy of the largest unit's gradients, which may come beside the last backward, and the norm's
                fp64 copy of a shard: above the threshold on top of what is kept of the step, below it out of that

The allocator's share and the first use were measured in twelve runs (with glibc; commit 617da1e). What is kept of a
step is still there in the next, so a run's prediction never falls. On a GPU nothing of this holds: the fixed part is
the driver's, the allocator torch's (`reserved_bytes` and `fragmentation_share` of a device).
"""

from evenload.cost.memory import (
    embedding_parameters,
    static_bytes,
    trained_layer_parameters,
)
from evenload.types.model import ModelSpec
from evenload.types.plan import StepPlan

ALLOCATOR_SHARE = 0.3
"""Of activations and buffers at their peak, held by the allocator beyond them."""
FIRST_USE_BYTES = 44 * 2**20
"""Of oneDNN, MKL and autograd's threads."""
MAPPED_BYTES = 32 * 2**20
"""Above it glibc maps memory for a tensor alone and unmaps it at once (`DEFAULT_MMAP_THRESHOLD_MAX`)."""


def process_bytes(model: ModelSpec, plan: StepPlan, fixed_bytes: int) -> int:
    """Predicted peak of the fullest process while it runs a plan, alone or after lighter ones.

    Args:
        fixed_bytes: resident bytes before the first step beside weights, gradients and optimizer state.
    """
    layout = plan.layout
    static = int(static_bytes(model, layout).max())
    activations = plan.predicted.peak_memory_bytes - static
    # The fewest have the largest shards; only ranks that share weights reduce anything.
    copies, element = min(layout.data_sizes), max(model.bytes_per_element, 4)
    unit = max(trained_layer_parameters(model, layout.tp), _trained_embedding(model, layout.tp))
    after = [8 * -(-unit // copies)]
    if max(layout.data_sizes) > 1:
        after.append(element * unit)
    mapped = sum(one for one in after if one > MAPPED_BYTES)
    kept = max(round((1 + ALLOCATOR_SHARE) * activations), sum(after) - mapped)
    return fixed_bytes + static + FIRST_USE_BYTES + kept + mapped


def _trained_embedding(model: ModelSpec, tp: int) -> int:
    return 0 if model.adapter_parameters_per_layer else embedding_parameters(model, tp) + model.position_parameters
