"""Why packs take as long as they do: their seconds by cause, which add up to `PackCosts.pack_seconds`.

One thing after the other is taken away, and each difference is that cause's share:

    as planned ─ copies to the host ─ recompute ─ waiting for keys and values ─ tensor-parallel transfers
               ─ tiles and constants ─ padding = useful work

So a cause is what would be saved if it went away after those before it in the chain; only copies and transfers
of keys and values depend on the order (they hide behind the rest), and they come first. Seconds are of one rank of
the group that shares a pack.

DACP (Skrull): some documents of a pack lie whole on one rank. Causes are then means over the ranks, and what the
slowest rank takes beyond its transfers and beyond the mean is `cp_imbalance_s`.

O(slices + packs · stages) numpy, seven times the price of `pack_seconds`; for chosen plans, not for candidates.
"""

import dataclasses
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from evenload.cost.activation import OFFLOAD, REPLAY
from evenload.cost.pack_cost import PackCosts
from evenload.types.columns import SliceColumns
from evenload.types.micropack import Direction


@dataclass(frozen=True, eq=False, kw_only=True)
class PackSplit:
    """Seconds of packs by cause; float64[num_packs, P] each, names as in `TimeSplit`."""

    useful_s: NDArray[np.float64]
    kernels_s: NDArray[np.float64]
    padding_s: NDArray[np.float64]
    recompute_s: NDArray[np.float64]
    offload_s: NDArray[np.float64]
    tp_communication_s: NDArray[np.float64]
    cp_communication_s: NDArray[np.float64]
    cp_imbalance_s: NDArray[np.float64]

    def total_s(self) -> NDArray[np.float64]:
        """All causes; float64[num_packs, P]."""
        return np.sum([getattr(self, field.name) for field in dataclasses.fields(self)], axis=0)


def split_pack_seconds(
    costs: PackCosts,
    columns: SliceColumns,
    direction: Direction,
    policy: NDArray[np.int8] | None = None,
    owner: NDArray[np.int64] | None = None,
    pack_s: NDArray[np.float64] | None = None,
) -> PackSplit:
    """Seconds of every pack on every virtual stage by cause.

    Args:
        policy: int8[num_documents], indices into `cost.activation.POLICIES`; None = all replay.
        owner: int64[num_slices], the rank that computes a slice whole, -1 = all share it (DACP); None = all shared.
        pack_s: float64[num_packs, P], seconds as planned; needed with `owner`, because how the ranks' compute and
            transfers overlap is the planner's.
    """
    view = _Shared(columns) if owner is None else _Owned(columns, owner, costs.layout.cp, policy)
    coefficients, layout = costs.coefficients, costs.layout
    without_tp = msgspec.structs.replace(coefficients, tensor_exposed_share=0.0)
    passes = {
        name: msgspec.structs.replace(getattr(without_tp, name), prefix_s_per_token=0.0, slice_s=0.0, pack_s=0.0)
        for name in ("forward", "backward")
    }
    ideal = msgspec.structs.replace(without_tp, attention_tile=1, head_pack_s=0.0, **passes)
    compute_s = view.compute_seconds(costs, direction)
    without_tp_s = view.compute_seconds(PackCosts(costs.model, without_tp, layout), direction)
    ideal_costs = PackCosts(costs.model, ideal, layout)
    ideal_s = view.compute_seconds(ideal_costs, direction)
    useful_s = view.without_padding().compute_seconds(ideal_costs, direction) if columns.pad_to.any() else ideal_s
    waiting_s = view.waiting_seconds(costs, direction)
    kept = None if policy is None else np.where(policy == OFFLOAD, REPLAY, policy).astype(np.int8)
    recomputed_s = view.seconds(costs, direction, kept) if kept is not None and kept.any() else compute_s + waiting_s
    copied = policy is not None and bool((policy == OFFLOAD).any())
    planned_s = view.seconds(costs, direction, policy) if copied else recomputed_s
    imbalance_s = np.zeros_like(compute_s)
    if owner is not None:
        assert pack_s is not None, "packs with owners need their planned seconds"
        imbalance_s = pack_s - planned_s
    return PackSplit(
        useful_s=useful_s,
        kernels_s=without_tp_s - ideal_s,
        padding_s=ideal_s - useful_s,
        recompute_s=recomputed_s - compute_s - waiting_s,
        offload_s=planned_s - recomputed_s,
        tp_communication_s=compute_s - without_tp_s,
        cp_communication_s=waiting_s,
        cp_imbalance_s=imbalance_s,
    )


class _Shared:
    """Packs all of whose slices are shared alike."""

    def __init__(self, columns: SliceColumns) -> None:
        self.columns = columns

    def without_padding(self) -> "_Shared":
        return _Shared(dataclasses.replace(self.columns, pad_to=np.zeros_like(self.columns.pad_to)))

    def compute_seconds(self, costs: PackCosts, direction: Direction) -> NDArray[np.float64]:
        return costs.compute_seconds(self.columns, direction)

    def waiting_seconds(self, costs: PackCosts, direction: Direction) -> NDArray[np.float64]:
        return costs.pack_seconds(self.columns, direction) - self.compute_seconds(costs, direction)

    def seconds(self, costs: PackCosts, direction: Direction, policy: NDArray[np.int8] | None) -> NDArray[np.float64]:
        return costs.pack_seconds(self.columns, direction, policy)


class _Owned(_Shared):
    """Packs of which some slices lie whole on one rank of `cp`; seconds are means over the ranks.

    Transfers of shared slices hide behind the local ones of the rank that has most of them, as `skrull` plans.
    """

    def __init__(
        self, columns: SliceColumns, owner: NDArray[np.int64], cp: int, policy: NDArray[np.int8] | None
    ) -> None:
        super().__init__(columns)
        local, pack = owner >= 0, columns.pack_of_slice()
        self.cp, self.policy = cp, policy
        self.shared = columns.assigned(~local, pack, columns.num_packs)
        self.local = columns.assigned(local, pack * cp + np.where(local, owner, 0), columns.num_packs * cp)
        self.nothing = columns.assigned(np.zeros_like(local), pack, columns.num_packs)

    def without_padding(self) -> "_Owned":
        return self  # such packs are never padded

    def compute_seconds(self, costs: PackCosts, direction: Direction) -> NDArray[np.float64]:
        shared_s = costs.compute_seconds(self.shared, direction)
        return (
            shared_s
            + self._local(costs.compute_seconds(self.local, direction)).mean(axis=1)
            - self._once(costs, direction)
        )

    def waiting_seconds(self, costs: PackCosts, direction: Direction) -> NDArray[np.float64]:
        # Behind local work as planned, also where a part of it is recompute.
        slowest_s = self._local(costs.pack_seconds(self.local, direction, self.policy)).max(axis=1)
        return np.maximum(0.0, costs.context_seconds(self.shared, direction) - slowest_s)

    def seconds(self, costs: PackCosts, direction: Direction, policy: NDArray[np.int8] | None) -> NDArray[np.float64]:
        exposed_s = costs.pack_seconds(self.shared, direction) - costs.compute_seconds(self.shared, direction)
        shared_s = costs.pack_seconds(self.shared, direction, policy) - exposed_s
        local_s = self._local(costs.pack_seconds(self.local, direction, policy)).mean(axis=1)
        return shared_s + local_s - self._once(costs, direction) + self.waiting_seconds(costs, direction)

    def _local(self, seconds: NDArray[np.float64]) -> NDArray[np.float64]:
        """[num_packs · cp, P] as [num_packs, cp, P]."""
        return seconds.reshape(self.columns.num_packs, self.cp, seconds.shape[1])

    def _once(self, costs: PackCosts, direction: Direction) -> NDArray[np.float64]:
        """The constant of a pack, which shared and local slices pay together."""
        return costs.compute_seconds(self.nothing, direction)
