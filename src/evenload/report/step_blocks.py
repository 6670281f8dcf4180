"""A step's timeline and plan as packed columns for the page's step view (`packed_columns`).

Timeline: tasks sorted by lane (replica, pipeline rank) and start. Times count whole units of `unit_s`, a power of ten
seconds (1 ns where the step allows), rounded once: a task stores the gap since the task before it on its lane ended,
and its length, so neighbours that touch in the timeline touch on the screen. Memory samples store time and KiB as
differences. Plan: documents, packs and slices as in `StepPlan`, documents by index.

Price: O(n log n) in tasks, samples and slices.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenload.report.packed_columns import pack_columns
from evenload.types.plan import StepPlan
from evenload.types.timeline import Timeline

_KIB = 1024
# The largest difference that stays within int32, whatever the order of the tasks.
_MOST_UNITS = 2**31 - 1

Block = tuple[str, dict[str, Any]]
"""(text of the data block, what the page must know to read it)."""


def timeline_block(timeline: Timeline) -> Block:
    """Encode a timeline."""
    unit_s = _unit_s(timeline)
    lane_of_task = _lane_key(timeline.dp_rank, timeline.rank)
    lane_of_sample = _lane_key(timeline.memory_dp_rank, timeline.memory_rank)
    lanes = np.union1d(lane_of_task, lane_of_sample)
    order = np.lexsort((timeline.start_s, lane_of_task))
    start, end = (np.rint(column[order] / unit_s).astype(np.int64) for column in (timeline.start_s, timeline.end_s))
    lane = np.searchsorted(lanes, lane_of_task[order])
    is_first = np.ones(len(lane), dtype=bool)
    is_first[1:] = lane[1:] != lane[:-1]
    samples = np.argsort(lane_of_sample, kind="stable")
    sample_lane = np.searchsorted(lanes, lane_of_sample[samples])
    critical = np.zeros(timeline.num_tasks, bool) if timeline.is_critical is None else timeline.is_critical
    text, directory = pack_columns(
        {
            "laneDp": lanes >> 32,
            "laneRank": lanes & 0xFFFFFFFF,
            "laneTasks": np.bincount(lane, minlength=len(lanes)),
            "gap": start - np.where(is_first, 0, np.concatenate([[0], end[:-1]])) if len(start) else start,
            "length": end - start,
            "stage": timeline.stage[order],
            "kind": timeline.kind[order],
            "pack": timeline.pack[order],
            "critical": critical[order].astype(np.uint8),
            "laneSamples": np.bincount(sample_lane, minlength=len(lanes)),
            "sampleGap": _differences(np.rint(timeline.memory_time_s[samples] / unit_s).astype(np.int64), sample_lane),
            "sampleKib": _differences(np.rint(timeline.memory_bytes[samples] / _KIB).astype(np.int64), sample_lane),
        }
    )
    return text, {
        "columns": directory,
        "unitS": unit_s,
        "stepTimeS": timeline.step_time_s,
        "bubble": timeline.bubble_fraction(),
    }


def plan_block(plan: StepPlan) -> Block:
    """Encode what the packs of a plan hold."""
    index = {document.doc_id: position for position, document in enumerate(plan.documents)}
    packs = [
        (r.dp_rank, d, pack) for r in plan.pack_plans for d, part in enumerate((r.forward, r.backward)) for pack in part
    ]
    pieces = [piece for _, _, pack in packs for piece in pack.slices]
    policy_names = sorted({name for replica in plan.pack_plans for name in replica.policies.values()})
    policy = np.zeros(len(plan.documents), np.uint8)
    for replica in plan.pack_plans:
        for doc_id, name in replica.policies.items():
            policy[index[doc_id]] = 1 + policy_names.index(name)
    text, directory = pack_columns(
        {
            "docId": [document.doc_id for document in plan.documents],
            "docTokens": [document.num_tokens for document in plan.documents],
            "docPolicy": policy,
            "packDp": [dp_rank for dp_rank, _, _ in packs],
            "packDirection": [direction for _, direction, _ in packs],
            "packIndex": [pack.index for _, _, pack in packs],
            "packSlices": [len(pack.slices) for _, _, pack in packs],
            "packPadTo": [pack.pad_to for _, _, pack in packs],
            "sliceDoc": [index[piece.doc_id] for piece in pieces],
            "sliceStart": [piece.start for piece in pieces],
            "sliceLength": [piece.stop - piece.start for piece in pieces],
            "sliceCp": [piece.cp for piece in pieces],
        }
    )
    left_out = [f"{left.doc_id} ({left.num_tokens:,} tokens): {left.reason}" for left in plan.left_out]
    return text, {"columns": directory, "policies": ["replay", *policy_names], "leftOut": left_out}


def _lane_key(dp_rank: NDArray[np.int32], rank: NDArray[np.int32]) -> NDArray[np.int64]:
    return dp_rank.astype(np.int64) << 32 | rank.astype(np.int64)


def _unit_s(timeline: Timeline) -> float:
    """The finest power of ten of seconds in which the whole step fits int32."""
    longest = max(
        timeline.step_time_s, float(timeline.end_s.max(initial=0)), float(timeline.memory_time_s.max(initial=0))
    )
    exponent = -9
    while longest > _MOST_UNITS * 10.0**exponent:
        exponent += 1
    return float(f"1e{exponent}")


def _differences(values: NDArray[np.int64], lane: NDArray[np.int64]) -> NDArray[np.int64]:
    """Differences to the value before, on each lane; the first one is kept."""
    result = values.copy()
    same = lane[1:] == lane[:-1]
    result[1:][same] -= values[:-1][same]
    return result
