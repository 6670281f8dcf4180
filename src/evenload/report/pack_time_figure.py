"""How evenly strategies cut: the spread of pack times, forward over backward, one violin a strategy (SlimPack
Figs. 14 to 16).

A pack counts with its slowest stage (`types.pack_times`), relative to the mean pack of its step and set of ranks: a
pipeline moves at the pace of its slowest pack, whatever a mean pack takes, and strategies cut into different numbers
of packs. A set is a replica, or the replicas that share a pack (DP-Merge), as in the planner's imbalance. Where a
strategy has few packs every pack is a point; a density over ten points would be invention.
Price: O(n log n) in packs; the page holds four bytes a pack.
"""

from collections.abc import Mapping, Sequence
from html import escape

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray
from plotly.subplots import make_subplots

from evenload.report.palette import KIND_STYLES, PREDICTED
from evenload.report.units import format_ratio
from evenload.types.micropack import Direction
from evenload.types.pack_times import PackSeconds, pack_times
from evenload.types.plan import StepPlan
from evenload.types.timeline import Timeline

_DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")
_COLORS = {"forward": KIND_STYLES["F"].even, "backward": KIND_STYLES["B"].even}
_ROW_PX = 34
_GAP_PX, _TOP_PX, _BOTTOM_PX = 44, 66, 50
_MOST_POINTS = 40
"""Up to this many packs are drawn one by one."""
_SPREAD_OF_POINTS = 0.22
_ROOM = 1.14
"""The axis is longer than the longest shape by this factor, for the numbers."""
_MOST_SHOWN = 5.0
"""Ratios beyond lie outside of the first view, or one strategy's worst pack would squeeze all shapes to a line."""

Steps = Sequence[tuple[Timeline, StepPlan | None]]
"""A timeline of every step, with its plan where that is known."""


def pack_time_figure(sections: Mapping[str, Mapping[str, Steps]]) -> go.Figure:
    """Violins of pack time over mean pack time, by strategy and origin ("predicted", "measured"); the number beside
    each is max/mean, mean over the steps."""
    rows = [(name, origin) for name, origins in sections.items() for origin in origins]
    both = len({origin for _, origin in rows}) > 1
    panel_px = _ROW_PX * max(1, len(rows)) + 10
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=_GAP_PX / (_GAP_PX + 2 * panel_px))
    largest = 1.0
    for panel, direction in enumerate(_DIRECTIONS, start=1):
        for row, (name, origin) in enumerate(rows):
            steps = [relative_times(timeline, plan, direction) for timeline, plan in sections[name][origin]]
            ratios = np.concatenate(steps)
            if not len(ratios):
                continue
            largest = max(largest, float(ratios.max()))
            is_hollow = both and origin == "predicted"
            color = PREDICTED if is_hollow else _COLORS[direction]
            figure.add_trace(_shape(ratios, row, color, is_hollow), row=panel, col=1)
            slowest = float(ratios.max())
            # Mean over the steps, as in the comparison of strategies.
            text = format_ratio(float(np.mean([one.max() for one in steps if len(one)])))
            # Beside the end of a shape; over it where the shape goes on beyond the view.
            place = {"x": slowest, "xanchor": "left", "xshift": 7}
            if slowest > _MOST_SHOWN:
                text = f"{text}, slowest {slowest:.1f}× ▸"
                place = {"x": _MOST_SHOWN * _ROOM, "xanchor": "right", "yshift": 9}
            note = {"text": text, "y": row, "showarrow": False, "font": {"size": 11.5}}
            figure.add_annotation(**place, **note, row=panel, col=1)
        figure.add_annotation(
            text=f"<b>{direction.capitalize()} packs</b>",
            xref="paper",
            yref=f"y{'' if panel == 1 else panel} domain",
            x=0,
            y=1,
            xanchor="left",
            yanchor="bottom",
            yshift=4,
            showarrow=False,
            font={"size": 13},
        )
    names = [escape(f"{name}, {origin}" if both else name, quote=False) for name, origin in rows]
    figure.update_layout(
        height=_TOP_PX + 2 * panel_px + _GAP_PX + _BOTTOM_PX,
        margin={"l": min(240, 28 + 7 * max(map(len, names))), "r": 16, "t": _TOP_PX - 30, "b": _BOTTOM_PX},
        hovermode="closest",
        showlegend=False,
        violingap=0,
    )
    figure.update_yaxes(
        tickvals=list(range(len(rows))),
        ticktext=names,
        range=[len(rows) - 0.5, -0.5],
        showgrid=False,
        zeroline=False,
        fixedrange=True,
    )
    # Room on the right for the numbers.
    figure.update_xaxes(zeroline=False, range=[0, min(largest, _MOST_SHOWN) * _ROOM], ticksuffix="×")
    figure.update_xaxes(title_text="time of a pack over the mean pack", row=2, col=1)
    for panel in (1, 2):
        figure.add_vline(x=1, line={"color": PREDICTED, "width": 1, "dash": "dot"}, row=panel, col=1)  # type: ignore[arg-type]
    return figure


def relative_times(timeline: Timeline, plan: StepPlan | None, direction: Direction) -> NDArray[np.float64]:
    """Seconds of every pack over the mean of its set of ranks, sets without time left out; the maximum is max/mean."""
    times = pack_times(timeline, direction)
    sets = _sets(times, plan, direction)
    parts = [times.seconds[sets == one] for one in np.unique(sets)]
    return np.concatenate([np.zeros(0), *(part / part.mean() for part in parts if part.sum() > 0)])


def _sets(times: PackSeconds, plan: StepPlan | None, direction: Direction) -> NDArray[np.int64]:
    """A number for the set of ranks of every pack: its replica, and how many ranks share its first slice."""
    if plan is None:
        return times.dp_rank
    ranks = {
        (replica.dp_rank, pack.index): pack.slices[0].cp if pack.slices else 0
        for replica in plan.pack_plans
        for pack in (replica.forward if direction == "forward" else replica.backward)
    }
    keys = zip(times.dp_rank.tolist(), times.pack.tolist(), strict=True)
    return times.dp_rank << 32 | np.array([ranks.get(key, 0) for key in keys], np.int64)


def _shape(ratios: NDArray[np.float64], row: int, color: str, is_hollow: bool) -> go.Violin | go.Scatter:
    if len(ratios) <= _MOST_POINTS:
        # Spread by place, not by chance: the same report is the same picture.
        offsets = (np.arange(len(ratios)) * 0.618034 % 1 - 0.5) * _SPREAD_OF_POINTS
        return go.Scatter(
            x=ratios.astype(np.float32),
            y=row + offsets,
            mode="markers",
            marker={"size": 6, "color": color, "opacity": 0.8, "symbol": "circle-open" if is_hollow else "circle"},
            hovertemplate="%{x:.3f} of the mean pack<extra></extra>",
        )
    return go.Violin(
        x=ratios.astype(np.float32),
        y0=row,
        orientation="h",
        width=0.86,
        points=False,
        spanmode="hard",
        box={"visible": True, "width": 0.22},
        meanline={"visible": True},
        line={"color": color, "width": 1.3},
        fillcolor="rgba(0,0,0,0)" if is_hollow else f"{color}55",
        hoverinfo="x",
        hoveron="violins",
    )
