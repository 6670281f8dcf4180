"""The step view of a page: any strategy, step and replica as timeline, memory and documents, drawn in the browser.

All timelines and plans of a report travel as packed columns (`step_blocks`); a choice in the page unpacks what it
needs and draws it on canvases, with true widths at every zoom. So the page opens at once however many steps it holds.

Price, measured in headless Chromium without a GPU on two shared cores: 16 stages and 512 packs, predicted over measured
(32,768 bars, 65,000 memory samples) are first drawn in 0.4 s and again in 30 to 60 ms, and add 0.4 MB to the page; nine
strategies over four steps of 2,048 documents on 64 devices add 3.6 MB.
"""

import json
from collections.abc import Collection, Sequence
from typing import Any

from evenload.report.page import data_block, folded_html
from evenload.report.palette import KIND_STYLES, MEMORY_COLORS, SIDE_STYLES
from evenload.report.run_report import RunSection
from evenload.report.step_blocks import DataBlock, plan_block, timeline_block
from evenload.report.units import format_seconds
from evenload.types.timeline import COUNTED_KINDS, KINDS, MEMORY_KINDS, SIDE_KINDS

_BASELINE = "best_fit"
STEP_VIEW_SCRIPTS = (
    "packed_columns.js",
    "step_timeline.js",
    "step_memory.js",
    "step_documents.js",
    "step_tips.js",
    "step_controls.js",
    "step_link.js",
    "step_pointer.js",
    "step_view.js",
)
_STYLE_KEYS = ("even", "odd", "thin", "textEven", "textOdd", "name")
"""Fields of `KindStyle`, as the page's scripts call them."""
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
    """The figure with all steps of the sections that have some, the best one first; "" where none has."""
    sections = [section for section in sections if section.steps]
    if not sections:
        return ""
    names = [section.name for section in sections]
    first = names.index(best) if best in names else 0
    # Beside the best stands what it is compared with everywhere.
    compare = names.index(_BASELINE) if _BASELINE in names and names[first] != _BASELINE else -1
    blocks: list[str] = []
    index = {
        "kinds": [dict(zip(("letter", *_STYLE_KEYS), (letter, *KIND_STYLES[letter]), strict=True)) for letter in KINDS],
        "sides": [
            {"name": SIDE_STYLES[kind][1], "color": SIDE_STYLES[kind][0], "inside": kind == "recompute"}
            if kind in SIDE_STYLES
            else None
            for kind in SIDE_KINDS
        ],
        "tails": {kind: {"name": name, "color": color} for kind, (color, name) in SIDE_STYLES.items()},
        "memory": {
            kind: {"name": kind.replace("_", " "), "color": MEMORY_COLORS[kind], "counted": kind in COUNTED_KINDS}
            for kind in MEMORY_KINDS
        },
        "sections": [_section(section, blocks, best, refused) for section in sections],
        "first": first,
        "compare": compare,
    }
    return "\n".join(
        [
            '<figure id="step-view" aria-labelledby="step-view-title">',
            '<h3 id="step-view-title">Timelines, memory, documents</h3>',
            '<div class="view"></div>',
            data_block("step-view-data", json.dumps(index, separators=(",", ":"))),
            *blocks,
            "<figcaption>",
            folded_html("read", "How to read this, and how to zoom", f"<p>{_READ}</p>"),
            "</figcaption>",
            "</figure>",
        ]
    )


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
    """A choice in the page. Trained runs have no time here: the view shows single steps, the comparison the run."""
    label = f"{section.name} ★" if is_best else section.name
    remarks = ["does not fit"] if is_refused else []
    if not section.metrics:
        origin, times = next(iter(section.timelines().items()))
        mean_s = sum(timeline.step_time_s for timeline, _ in times) / len(times)
        remarks.insert(0, f"{format_seconds(mean_s)} {origin}")
    return f"{label} ({', '.join(remarks)})" if remarks else label


def _add(blocks: list[str], block: DataBlock) -> dict[str, Any]:
    text, meta = block
    identifier = f"block-{len(blocks)}"
    blocks.append(f'<script type="application/gzip" id="{identifier}">{text}</script>')
    return {"block": identifier, **meta}
