"""Show any strategy, step and replica of a page as timeline, memory and documents, drawn in the browser.

Timelines and plans are packed columns, which are unpacked and drawn when they are chosen, so the page opens at once
however many steps it holds. Two timelines of 16 stages and 512 packs are drawn in 0.4 s and add 0.5 MB.
"""

import base64
import gzip
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenload.report.page import data_block, folded_html
from evenload.report.run_report import RunSection
from evenload.report.svg import KIND_STYLES, MEMORY_COLORS, SIDE_STYLES
from evenload.types.plan import StepPlan
from evenload.types.text import format_seconds
from evenload.types.timeline import COUNTED_KINDS, KINDS, MEMORY_KINDS, SIDE_KINDS, Timeline

_INTEGERS = (np.uint8, np.int8, np.uint16, np.int16, np.uint32, np.int32)


def pack_columns(columns: Mapping[str, NDArray | Sequence[int]]) -> tuple[str, list[tuple[str, str, int]]]:
    """Encode one-dimensional columns as compact text, a few bytes a task; `packed_columns.js` is the inverse.

    Integers take the narrowest type that holds them (beyond 32 bits float64, exact to 2**53); floats stay float64.

    Returns:
        Base64 text of the gzipped bytes, and (name, type, length) of each column in their order; types `u1 i1 u2 i2 u4
        i4 f8`, little-endian, widest first so that every column is aligned.
    """
    narrowed = [(name, _narrow(np.asarray(column))) for name, column in columns.items()]
    narrowed.sort(key=lambda item: -item[1].dtype.itemsize)
    # A fixed time stamp, so that the same report has the same bytes.
    content = gzip.compress(b"".join(column.tobytes() for _, column in narrowed), 9, mtime=0)
    directory = [(name, column.dtype.str[1:], len(column)) for name, column in narrowed]
    return base64.b64encode(content).decode("ascii"), directory


def _narrow(column: NDArray) -> NDArray:
    low, high = (int(column.min()), int(column.max())) if len(column) else (0, 0)
    holding = (one for one in _INTEGERS if np.iinfo(one).min <= low and high <= np.iinfo(one).max)
    kind = np.float64 if column.dtype.kind == "f" else next(holding, np.float64)
    return column.astype(np.dtype(kind).newbyteorder("<"))


_KIB = 1024
_MOST_UNITS = 2**31 - 1
"""The largest difference that fits int32, whatever the order of the tasks."""
_UNITS_S = [float(f"1e{exponent}") for exponent in range(-9, 10)]
_SIDE_KINDS_IN_ROWS = ("recompute", "offload", "reload")
_SIDE_KINDS_AT_END = ("reduction", "optimizer", "gather")

DataBlock = tuple[str, dict[str, Any]]
"""(text of the data block, what the page needs to read it)."""


def timeline_block(timeline: Timeline) -> DataBlock:
    """Encode a timeline: tasks sorted by lane (replica, pipeline rank) and start, and memory samples. O(n log n).

    Times count whole units of `unit_s`, a power of ten seconds, rounded once: a task stores the gap since the last one
    on its lane, and its length, so neighbours touch on the screen. Samples store time and KiB as differences, which
    compress well, by kind where the timeline knows it.
    """
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
    side, tail = _side_columns(timeline, lanes, unit_s)
    kinds = _memory_columns(timeline, samples, sample_lane)
    sampled = np.rint(timeline.memory_time_s[samples] / unit_s).astype(np.int64)
    columns = {
        **{"laneDp": lanes >> 32, "laneRank": lanes & 0xFFFFFFFF, "laneTasks": np.bincount(lane, minlength=len(lanes))},
        "gap": start - np.where(is_first, 0, np.concatenate([[0], end[:-1]])) if len(start) else start,
        "length": end - start,
        **{key: getattr(timeline, key)[order] for key in ("stage", "kind", "pack")},
        "critical": critical[order].astype(np.uint8),
        "laneSamples": np.bincount(sample_lane, minlength=len(lanes)),
        "sampleGap": _differences(sampled, sample_lane),
        **side,
        **kinds,
    }
    text, directory = pack_columns(columns)
    return text, {
        "columns": directory,
        "unitS": unit_s,
        "stepTimeS": timeline.step_time_s,
        "bubble": timeline.bubble_fraction(),
        "tail": tail,
        "memoryKinds": [name.removeprefix("kib ") for name in kinds if name != "kib"],
    }


def _side_columns(
    timeline: Timeline, lanes: NDArray[np.int64], unit_s: float
) -> tuple[dict[str, NDArray], list[tuple[str, float, float]]]:
    """Encode side tasks inside packs; return them, and (name, start, end in seconds) of what ends the step."""
    side = timeline.side
    if side is None:
        return {}, []
    lane = np.searchsorted(lanes, _lane_key(side.dp_rank, side.rank))
    shown = np.isin(side.kind, [SIDE_KINDS.index(name) for name in _SIDE_KINDS_IN_ROWS])
    order = np.flatnonzero(shown)[np.lexsort((side.start_s[shown], lane[shown]))]
    start, end = (np.rint(column[order] / unit_s).astype(np.int64) for column in (side.start_s, side.end_s))
    tail = []
    packs_end_s = float(timeline.end_s.max(initial=0.0))
    for name in _SIDE_KINDS_AT_END:
        of_kind = (side.kind == SIDE_KINDS.index(name)) & (side.end_s > packs_end_s)
        if of_kind.any():
            start_s = max(packs_end_s, float(side.start_s[of_kind].min()))
            tail.append((name, start_s, float(side.end_s[of_kind].max())))
    return {
        "laneSides": np.bincount(lane[order], minlength=len(lanes)),
        "sideKind": side.kind[order],
        "sideStart": _differences(start, lane[order]),
        "sideLength": end - start,
    }, tail


def _memory_columns(
    timeline: Timeline, samples: NDArray[np.int64], sample_lane: NDArray[np.int64]
) -> dict[str, NDArray[np.int64]]:
    """Encode KiB as differences: in all ("kib"), or by every kind that is ever held."""
    by_kind = timeline.memory_kind_bytes
    if by_kind is None:
        return {"kib": _differences(np.rint(timeline.memory_bytes[samples] / _KIB).astype(np.int64), sample_lane)}
    used = np.flatnonzero(by_kind.any(axis=0)).tolist()
    kib = np.rint(by_kind[samples] / _KIB).astype(np.int64)
    return {f"kib {MEMORY_KINDS[kind]}": _differences(kib[:, kind], sample_lane) for kind in used}


def plan_block(plan: StepPlan) -> DataBlock:
    """Encode documents, packs and slices, which name documents by index."""
    index = {document.doc_id: position for position, document in enumerate(plan.documents)}
    packs = [
        (r.dp_rank, d, pack) for r in plan.pack_plans for d, part in enumerate((r.forward, r.backward)) for pack in part
    ]
    pieces = [piece for _, _, pack in packs for piece in pack.slices]
    policies = {doc_id: name for replica in plan.pack_plans for doc_id, name in replica.policies.items()}
    policy_names = sorted(set(policies.values()))
    numbers = {None: 0} | {name: at for at, name in enumerate(policy_names, start=1)}
    of_documents = [(one.doc_id, one.num_tokens, numbers[policies.get(one.doc_id)]) for one in plan.documents]
    of_packs = [(dp, way, pack.index, len(pack.slices), pack.pad_to) for dp, way, pack in packs]
    of_slices = [(index[one.doc_id], one.start, one.stop - one.start, one.cp) for one in pieces]
    tables = (
        (("docId", "docTokens", "docPolicy"), of_documents),
        (("packDp", "packDirection", "packIndex", "packSlices", "packPadTo"), of_packs),
        (("sliceDoc", "sliceStart", "sliceLength", "sliceCp"), of_slices),
    )
    text, directory = pack_columns(
        {name: [row[at] for row in rows] for names, rows in tables for at, name in enumerate(names)}
    )
    left_out = [f"{left.doc_id} (of length {left.num_tokens:,}): {left.reason}" for left in plan.left_out]
    return text, {"columns": directory, "policies": ["replay", *policy_names], "leftOut": left_out}


def _lane_key(dp_rank: NDArray[np.int32], rank: NDArray[np.int32]) -> NDArray[np.int64]:
    return dp_rank.astype(np.int64) << 32 | rank.astype(np.int64)


def _unit_s(timeline: Timeline) -> float:
    """Return the finest power of ten of seconds in which the whole step fits int32."""
    longest = max(timeline.step_time_s, timeline.end_s.max(initial=0), timeline.memory_time_s.max(initial=0))
    return next(unit_s for unit_s in _UNITS_S if longest <= _MOST_UNITS * unit_s)


def _differences(values: NDArray[np.int64], lane: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return differences to the value before, on each lane; the first one is kept."""
    result = values.copy()
    same = lane[1:] == lane[:-1]
    result[1:][same] -= values[:-1][same]
    return result


_BASELINE = "best_fit"
STEP_VIEW_SCRIPTS = (
    *("packed_columns.js", "step_timeline.js", "step_memory.js", "step_documents.js", "step_tips.js"),
    *("step_controls.js", "step_link.js", "step_pointer.js", "step_view.js"),
)
_STYLE_KEYS = ("letter", "even", "odd", "thin", "textEven", "textOdd", "name")
"""A kind's letter and the fields of `KindStyle` in the page's scripts."""
_READ = (
    "Every row is a pipeline rank, every bar one pack on one stage: <b>blue</b> forward, <b>orange</b> backward, light "
    "and dark in turn so that neighbours show. <b>Grey</b> is time in which the rank computes no pack. All timelines "
    "share one time axis: predicted and measured bars that stand in the same place were predicted right. "
    "<b>Memory</b> lines must stay under the dashed limit; predictions count buffers of the running pack, runs do not. "
    "<b>Documents</b> show where each is cut for forward and for "
    "backward; the colour is the pack, from early (violet) to late (yellow) in the step. Point at anything for what "
    "it holds; a pack lights up on all its stages. Drag sideways to zoom in, shift-drag to move, Ctrl and wheel to "
    "zoom, double-click to see everything again; on a touch screen pinch, drag and tap. The address of the page keeps "
    "what is chosen and shown: copy it to show somebody the same."
)


def step_view_html(sections: Sequence[RunSection], best: str = "", refused: Collection[str] = ()) -> str:
    """Return the figure with all steps of all sections, the best one first; "" where there are no steps."""
    sections = [section for section in sections if section.steps]
    if not sections:
        return ""
    names = [section.name for section in sections]
    first = names.index(best) if best in names else 0
    # The best is compared with the baseline, as everywhere.
    compare = names.index(_BASELINE) if _BASELINE in names and names[first] != _BASELINE else -1
    blocks: list[str] = []
    tails = {kind: {"name": name, "color": color} for kind, (color, name) in SIDE_STYLES.items()}
    index = {
        "kinds": [dict(zip(_STYLE_KEYS, (letter, *KIND_STYLES[letter]), strict=True)) for letter in KINDS],
        "sides": [tails[kind] | {"inside": kind == "recompute"} if kind in tails else None for kind in SIDE_KINDS],
        "tails": tails,
        "memory": {
            kind: {"name": kind.replace("_", " "), "color": MEMORY_COLORS[kind], "counted": kind in COUNTED_KINDS}
            for kind in MEMORY_KINDS
        },
        "sections": [_section(section, blocks, best, refused) for section in sections],
        "first": first,
        "compare": compare,
    }
    parts = [
        '<figure id="step-view" aria-labelledby="step-view-title">',
        '<h3 id="step-view-title">Timelines, memory, documents</h3>',
        '<div class="view"></div>',
        data_block("step-view-data", json.dumps(index, separators=(",", ":"))),
        *blocks,
        f"<figcaption>{folded_html('read', 'How to read this, and how to zoom', f'<p>{_READ}</p>')}</figcaption>",
        "</figure>",
    ]
    return "\n".join(parts)


def _section(section: RunSection, blocks: list[str], best: str, refused: Collection[str]) -> dict[str, Any]:
    steps = []
    for view in section.steps:
        views = {origin: _add(blocks, timeline_block(timeline)) for origin, timeline in view.timelines().items()}
        plan = _add(blocks, plan_block(view.plan)) if view.plan else None
        steps.append({"step": view.step, "views": views, "plan": plan})
    return {
        "name": section.name,
        "label": _label(section, is_best=section.name == best, is_refused=section.name in refused),
        "limitBytes": section.memory_limit_bytes,
        "steps": steps,
    }


def _label(section: RunSection, *, is_best: bool, is_refused: bool) -> str:
    """Return the label of a choice. Trained runs have no time here: the view shows single steps."""
    remarks = ["does not fit"] if is_refused else []
    if not section.metrics:
        origin, times = next(iter(section.timelines().items()))
        mean_s = sum(timeline.step_time_s for timeline in times) / len(times)
        remarks = [f"{format_seconds(mean_s)} {origin}", *remarks]
    return section.name + (" ★" if is_best else "") + (f" ({', '.join(remarks)})" if remarks else "")


def _add(blocks: list[str], block: DataBlock) -> dict[str, Any]:
    text, meta = block
    identifier = f"block-{len(blocks)}"
    blocks.append(f'<script type="application/gzip" id="{identifier}">{text}</script>')
    return {"block": identifier, **meta}
