"""The layout `evenload plan` assumes when none is given: the shallowest pipeline that leaves room to train.

Layout decides more than any packer and a search over sampled batches is planned. Until then: the
smallest pp, a divisor of the devices, whose weights, gradients and optimizer state take at most half of a
device; all other devices are data parallel. O(divisors).
"""

from evenload.cost.memory import static_bytes
from evenload.errors import InfeasiblePlanError
from evenload.types.cluster import ClusterSpec
from evenload.types.layout import ParallelLayout, even_layout
from evenload.types.model import ModelSpec
from evenload.types.scaled_units import format_bytes

STATIC_SHARE = 0.5
"""Of a device's memory; the rest is for activations."""


def default_layout(model: ModelSpec, cluster: ClusterSpec) -> ParallelLayout:
    """dp x pp over all devices of the cluster; an `InfeasiblePlanError` where the model fits at no depth."""
    room = usable_bytes(cluster)
    depths = [pp for pp in range(1, model.num_layers + 1) if cluster.num_devices % pp == 0]
    for pp in depths:
        layout = even_layout(model.num_layers, dp=cluster.num_devices // pp, pp=pp)
        if static_bytes(model, layout).max() <= STATIC_SHARE * room:
            return layout
    deepest = even_layout(model.num_layers, dp=cluster.num_devices // depths[-1], pp=depths[-1])
    raise InfeasiblePlanError(
        f"model {model.name} needs {format_bytes(static_bytes(model, deepest).max())} a device for weights, "
        f"gradients and optimizer with {deepest.describe()}, a device of {cluster.name} offers {format_bytes(room)}; "
        "name a larger cluster"
    )


def usable_bytes(cluster: ClusterSpec) -> int:
    return cluster.device.usable_bytes
