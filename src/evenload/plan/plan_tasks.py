"""`replica_tasks`: a StepPlan's own numbers back as simulator input, for re-simulation and timelines.

Durations come from the plan, bytes from the model: a plan stores no bytes, but they follow from its slices.
"""

import dataclasses
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenload.cost.activation import POLICIES
from evenload.cost.memory import pipeline_bytes
from evenload.cost.owned_bytes import owned_pipeline_bytes, owners_from
from evenload.cost.split_backward import divide_backward
from evenload.types.columns import SliceColumns
from evenload.types.micropack import MicroPack, PackPlan
from evenload.types.model import ModelSpec
from evenload.types.pipeline import PipelineTasks
from evenload.types.plan import StepPlan


@dataclass(frozen=True, eq=False)
class ReplicaColumns:
    """One replica's packs as columns; `SliceColumns.doc` counts the documents of the whole plan.

    Args:
        num_tokens: int64[n], of the plan's documents.
        policy: int8[n], indices into `POLICIES`; None = all replay.
        owners: int64[num_slices] forward and backward, the rank that computes a slice whole, -1 = all; None = all.
    """

    forward: SliceColumns
    backward: SliceColumns
    num_tokens: NDArray[np.int64]
    policy: NDArray[np.int8] | None
    owners: tuple[NDArray[np.int64], NDArray[np.int64]] | None


def replica_columns(plan: StepPlan, dp_rank: int) -> ReplicaColumns:
    """A replica's packs, as its planner had them."""
    packs = plan.pack_plans[dp_rank]
    index = {document.doc_id: position for position, document in enumerate(plan.documents)}
    forward, backward = (owners_from([pack.sharding for pack in listed]) for listed in (packs.forward, packs.backward))
    return ReplicaColumns(
        forward=_columns(packs.forward, index),
        backward=_columns(packs.backward, index),
        num_tokens=np.array([document.num_tokens for document in plan.documents], np.int64),
        policy=_policy(packs, index),
        owners=None if forward is None or backward is None else (forward, backward),
    )


def replica_tasks(plan: StepPlan, dp_rank: int, model: ModelSpec) -> PipelineTasks:
    """The tasks of one replica, equal to those the planner simulated."""
    return tasks_of_columns(plan, dp_rank, model, replica_columns(plan, dp_rank))


def tasks_of_columns(plan: StepPlan, dp_rank: int, model: ModelSpec, columns: ReplicaColumns) -> PipelineTasks:
    """As `replica_tasks`, of columns that are at hand."""
    packs, times, layout = plan.pack_plans[dp_rank], plan.times[dp_rank], plan.layout
    forward, backward, num_tokens, policy = columns.forward, columns.backward, columns.num_tokens, columns.policy
    if columns.owners is None:
        held = pipeline_bytes(model, layout, forward, backward, num_tokens, policy)
    else:
        held = owned_pipeline_bytes(model, layout, forward, backward, num_tokens, policy, columns.owners)
    tasks = PipelineTasks(
        forward_s=np.array(times.forward_s, np.float64).reshape(len(packs.forward), layout.num_stages),
        backward_s=np.array(times.backward_s, np.float64).reshape(len(packs.backward), layout.num_stages),
        p2p_forward_s=np.array(times.p2p_forward_s, np.float64),
        p2p_backward_s=np.array(times.p2p_backward_s, np.float64),
        forwards_needed=np.array(packs.forwards_needed(), np.int32),
        stage_to_rank=np.array(layout.stage_to_rank, np.int32),
        static_bytes=held.static_bytes,
        forward_kept_bytes=held.forward_kept_bytes,
        forward_temp_bytes=held.forward_temp_bytes,
        backward_freed_bytes=held.backward_freed_bytes,
        backward_temp_bytes=held.backward_temp_bytes,
    )
    if not times.input_s:
        return tasks
    parts = (np.array(rows, np.float64).reshape(tasks.backward_s.shape) for rows in (times.input_s, times.weight_s))
    return dataclasses.replace(tasks, split=divide_backward(model, layout, tasks, backward, *parts))


def _policy(packs: PackPlan, index: dict[int, int]) -> NDArray[np.int8] | None:
    """Inverse of `PackPlan.policies`."""
    if not packs.policies:
        return None
    policy = np.zeros(len(index), np.int8)
    for doc_id, name in packs.policies.items():
        policy[index[doc_id]] = POLICIES.index(name)
    return policy


def _columns(packs: tuple[MicroPack, ...], index: dict[int, int]) -> SliceColumns:
    """Inverse of `SliceColumns.packs`."""
    pieces = [piece for pack in packs for piece in pack.slices]
    return SliceColumns(
        doc=np.array([index[piece.doc_id] for piece in pieces], np.int32),
        start=np.array([piece.start for piece in pieces], np.int64),
        stop=np.array([piece.stop for piece in pieces], np.int64),
        pack_offset=np.cumsum([0, *(len(pack.slices) for pack in packs)], dtype=np.int64),
        pad_to=np.array([pack.pad_to for pack in packs], np.int64),
        cp=np.array([piece.cp for piece in pieces], np.int64),
    )
