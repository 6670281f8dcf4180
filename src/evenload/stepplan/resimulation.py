"""Make simulator input of a StepPlan, for re-simulation and timelines: durations are the plan's own, bytes follow from
its slices and the model."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from evenload.cost.layer_counts import POLICIES
from evenload.cost.memory import ReplicaPacks, pipeline_bytes
from evenload.cost.pack_pricing import divide_backward
from evenload.types.columns import SliceColumns
from evenload.types.document import MicroPack, PackPlan
from evenload.types.model import ModelSpec
from evenload.types.pipeline import PipelineTasks
from evenload.types.plan import StepPlan
from evenload.types.tree_columns import TreeColumns


def replica_columns(plan: StepPlan, dp_rank: int) -> ReplicaPacks:
    """Return one replica's packs as columns, whose `doc` counts the documents of the whole plan."""
    packs = plan.pack_plans[dp_rank]
    index = {document.doc_id: position for position, document in enumerate(plan.documents)}
    policy = np.zeros(len(index), np.int8)
    for doc_id, name in packs.policies.items():
        policy[index[doc_id]] = POLICIES.index(name)
    return ReplicaPacks(
        forward=_columns(packs.forward, index),
        backward=_columns(packs.backward, index),
        num_tokens=np.array([document.num_tokens for document in plan.documents], np.int64),
        policy=policy if packs.policies else None,
        owners=_owners(packs, plan.layout.cp),
        shardings=tuple(pack.sharding for pack in packs.forward),
        trees=TreeColumns.of(plan.documents),
    )


def tasks_of_columns(plan: StepPlan, dp_rank: int, model: ModelSpec, packs: ReplicaPacks) -> PipelineTasks:
    """Return the tasks of one replica, equal to those the planner simulated."""
    timed = timed_tasks(plan, dp_rank)
    tasks = dataclasses.replace(timed, held=pipeline_bytes(model, plan.layout, packs), split=None)
    if timed.split is None:
        return tasks
    parts_s = timed.split.input_s, timed.split.weight_s
    return dataclasses.replace(tasks, split=divide_backward(model, plan.layout, tasks, packs.backward, *parts_s))


def timed_tasks(plan: StepPlan, dp_rank: int) -> PipelineTasks:
    """Return the predicted seconds of a replica and what its packs wait for, without bytes, which need the model."""
    packs, times = plan.pack_plans[dp_rank], plan.times[dp_rank]

    def grid(rows: Sequence[Sequence[float]]) -> NDArray[np.float64]:
        return np.array(rows, np.float64).reshape(len(rows), plan.layout.num_stages)

    return PipelineTasks.without_bytes(
        forward_s=grid(times.forward_s),
        backward_s=grid(times.backward_s),
        p2p_forward_s=np.array(times.p2p_forward_s, np.float64),
        p2p_backward_s=np.array(times.p2p_backward_s, np.float64),
        forwards_needed=packs.forwards_needed(),
        stage_to_rank=plan.layout.stage_to_rank,
        parts_s=(grid(times.input_s), grid(times.weight_s)) if times.input_s else None,
        num_ranks=plan.layout.pipeline_ranks,
    )


def _owners(packs: PackPlan, layout_cp: int) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
    """Of forward and backward slices; None where all ranks of the layout share every slice."""
    owner_of = {
        piece.doc_id: owner
        for pack in packs.forward
        if isinstance(pack.sharding, tuple)
        for piece, owner in zip(pack.slices, pack.sharding, strict=True)
        if piece.cp < layout_cp
    }
    if not owner_of:
        return None
    forward, backward = (
        np.array([owner_of.get(piece.doc_id, -1) for pack in listed for piece in pack.slices], np.int64)
        for listed in (packs.forward, packs.backward)
    )
    return forward, backward


def _columns(packs: tuple[MicroPack, ...], index: dict[int, int]) -> SliceColumns:
    pieces = [piece for pack in packs for piece in pack.slices]
    return SliceColumns(
        doc=np.array([index[piece.doc_id] for piece in pieces], np.int32),
        start=np.array([piece.start for piece in pieces], np.int64),
        stop=np.array([piece.stop for piece in pieces], np.int64),
        pack_offset=np.cumsum([0, *(len(pack.slices) for pack in packs)], dtype=np.int64),
        pad_to=np.array([pack.pad_to for pack in packs], np.int64),
        cp=np.array([piece.cp for piece in pieces], np.int64),
    )
