"""How evenly strategies cut: the spread of pack times, forward over backward, one violin a strategy (SlimPack
Figs. 14 to 16).

A pack counts with its slowest stage (`types.pack_times`), relative to the mean pack of its step and set of ranks: a
pipeline moves at the pace of its slowest pack, whatever a mean pack takes, and strategies cut into different numbers
of packs. A set is a replica, or the replicas that share a pack (DP-Merge), as in the planner's imbalance. Where a
strategy has few packs every pack is a point; a density over ten points would be invention. A violin is a Gaussian
kernel density with Scott's width ("Multivariate Density Estimation", 1992), cut off at the least and the largest pack.
Price: O(n) in packs, which are counted in narrow classes first; the page holds an outline of 60 points.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from evenload.report.axes import Scale, Tick, round_ticks, tick_labels
from evenload.report.figure import Figure, NumberTable, names_width_px, rows_chart
from evenload.report.palette import KIND_STYLES, PREDICTED
from evenload.report.svg_marks import dot, rect, shape, upright
from evenload.report.units import format_ratio
from evenload.types.micropack import Direction
from evenload.types.pack_times import PackSeconds, pack_times
from evenload.types.plan import StepPlan
from evenload.types.timeline import Timeline

_DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")
_COLORS = {"forward": KIND_STYLES["F"].even, "backward": KIND_STYLES["B"].even}
_ROW_PX = 34
_HALF_PX = 14.0
_MOST_POINTS = 40
"""Up to this many packs are drawn one by one."""
_SPREAD_OF_POINTS_PX = 7.0
_MOST_SHOWN = 5.0
"""Ratios beyond lie outside of the picture, or one strategy's worst pack would squeeze all shapes to a line."""
_CLASSES, _OUTLINE = 400, 60

Steps = Sequence[tuple[Timeline, StepPlan | None]]
"""A timeline of every step, with its plan where that is known."""


def pack_time_figure(sections: Mapping[str, Mapping[str, Steps]]) -> Figure:
    """Violins of pack time over mean pack time, by strategy and origin ("predicted", "measured"); the number beside
    each is max/mean, mean over the steps."""
    rows = [(name, origin) for name, origins in sections.items() for origin in origins]
    both = len({origin for _, origin in rows}) > 1
    names = [f"{name}, {origin}" if both else name for name, origin in rows]
    ratios = {
        direction: [
            [relative_times(timeline, plan, direction) for timeline, plan in sections[name][origin]]
            for name, origin in rows
        ]
        for direction in _DIRECTIONS
    }
    all_steps = [one for of_direction in ratios.values() for steps in of_direction for one in steps if len(one)]
    largest = max((float(one.max()) for one in all_steps), default=1.0)
    scale = Scale(0, min(largest, _MOST_SHOWN) * 1.04)
    at = round_ticks(0, scale.high, 6)
    ticks = [Tick(value, label) for value, label in zip(at, tick_labels(at, "×"), strict=True)]
    parts = []
    for direction in _DIRECTIONS:
        shown = []
        for name, (_, origin), steps in zip(names, rows, ratios[direction], strict=True):
            is_hollow = both and origin == "predicted"
            color = PREDICTED if is_hollow else _COLORS[direction]
            shown.append((name, _marks(np.concatenate(steps), scale, color, is_hollow), _note(steps)))
        label = f"{direction} packs, max over mean: " + "; ".join(f"{name} {note}" for name, _, note in shown)
        is_last = direction == _DIRECTIONS[-1]
        title = "time of a pack over the mean pack" if is_last else ""
        parts.append(f'<div class="panel-title">{direction.capitalize()} packs</div>')
        widths = {"names_px": names_width_px(names), "notes_px": 150}
        parts.append(rows_chart(shown, _ROW_PX, label, x=scale, ticks=ticks, title=title, **widths))
    table = [(name, *(_note(ratios[direction][row]) for direction in _DIRECTIONS)) for row, name in enumerate(names)]
    numbers = NumberTable(("max/mean", "forward packs", "backward packs"), tuple(table))
    return Figure(body="".join(parts), label="spread of pack times, forward and backward", numbers=numbers)


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


def _note(steps: Sequence[NDArray[np.float64]]) -> str:
    """Mean over the steps, as in the comparison of strategies; and the slowest where it is out of the picture."""
    found = [float(one.max()) for one in steps if len(one)]
    if not found:
        return "no packs"
    text = format_ratio(float(np.mean(found)))
    return f"{text}, slowest {max(found):.1f}× ▸" if max(found) > _MOST_SHOWN else text


def _marks(ratios: NDArray[np.float64], scale: Scale, color: str, is_hollow: bool) -> str:
    middle = _ROW_PX / 2
    mean = upright(scale.share(1), 0, _ROW_PX, "mean")
    shown = ratios[ratios <= scale.high]
    if len(ratios) <= _MOST_POINTS:
        # Spread by place, not by chance: the same report is the same picture.
        offsets = (np.arange(len(shown)) * 0.618034 % 1 - 0.5) * 2 * _SPREAD_OF_POINTS_PX
        points = zip(shown.tolist(), offsets.tolist(), strict=True)
        dots = (
            dot(scale.share(at), middle + offset, color, hollow=is_hollow, tip=f"{at:.3f} of the mean pack")
            for at, offset in points
        )
        return mean + "".join(dots)
    if not len(shown):
        return mean
    at, density = _density(ratios)
    inside = at <= scale.high
    at, half = at[inside], _HALF_PX * density[inside] / density.max()
    upper = [(scale.share(x), middle - h) for x, h in zip(at.tolist(), half.tolist(), strict=True)]
    lower = [(x, 2 * middle - y) for x, y in reversed(upper)]
    low, center, high = np.quantile(ratios, (0.25, 0.5, 0.75)).tolist()
    half_of_them = f"half of them take {low:.3f} to {high:.3f} of the mean pack"
    tip = f"{len(ratios):,} packs: {half_of_them}, the slowest {ratios.max():.3f}"
    marks = [shape([*upper, *lower], _ROW_PX, color, "none" if is_hollow else f"{color}55", tip)]
    box = scale.share(low), min(1.0, scale.share(high))
    if box[0] < box[1]:
        marks.append(rect(box, middle - 2.5, 5, color, tip))
    marks.append(upright(min(1.0, scale.share(center)), middle - 5, middle + 5, "median"))
    return mean + "".join(marks)


def _density(ratios: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Places and a density there, up to a factor."""
    low, high = float(ratios.min()), float(ratios.max())
    if high - low < 1e-9:
        return np.array([low - 0.002, low + 0.002]), np.ones(2)
    # Few packs that are far slower stretch the classes; the outline is as fine where it is drawn.
    counts, edges = np.histogram(ratios, bins=_CLASSES)
    centers = (edges[:-1] + edges[1:]) / 2
    width = max(1.06 * float(ratios.std()) * len(ratios) ** -0.2, (high - low) / _CLASSES)
    at = np.linspace(low, min(high, _MOST_SHOWN * 1.04), _OUTLINE) if low < _MOST_SHOWN else np.array([low, high])
    weights = np.exp(-0.5 * ((at[:, None] - centers) / width) ** 2)
    return at, weights @ counts
