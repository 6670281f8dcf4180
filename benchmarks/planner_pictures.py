"""Pictures of benchmarks/planners.py and benchmarks/planning_growth.py."""

from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from evenload.report.svg import MEASURED, PREDICTED, series_style
from picture import write_png

SHOWN_CASES = (("lognormal 32K", 512), ("lognormal 32K", 2048), ("github_dirs 32K", 512), ("github_dirs 128K", 512))
GRID = "rgba(128,134,145,0.25)"
TARGET = "#d1364c"
ROW_PX, MARGIN_PX, PANEL_PX, LABELS_PX = 24, 150, 260, 240


def draw_planners(rows: list[dict[str, Any]], setting: str, path: Path) -> None:
    """Bars: simulated fraction of the lower bound within memory, a panel a case; hollow where no policy fits."""
    there = {(row["case"], row["documents"]) for row in rows}
    panels = [case for case in SHOWN_CASES if case in there]
    names = list(dict.fromkeys(row["planner"] for row in rows if row.get("step_s") is not None))[::-1]
    titles = [f"{case}, {documents} documents" for case, documents in panels]
    figure = make_subplots(rows=1, cols=len(panels), shared_yaxes=True, subplot_titles=titles, horizontal_spacing=0.015)
    for column, (case, documents) in enumerate(panels, start=1):
        by_name = {row["planner"]: row for row in rows if (row["case"], row["documents"]) == (case, documents)}
        found = [by_name[name] for name in names if name in by_name and by_name[name].get("step_s") is not None]
        colors = [MEASURED if row["planner"].startswith("evenload") else PREDICTED for row in found]
        figure.add_trace(
            go.Bar(
                x=[100 * (row["within_fraction"] or row["fraction"]) for row in found],
                y=[row["planner"] for row in found],
                orientation="h",
                marker={
                    "color": ["white" if _beyond_memory(row) else c for row, c in zip(found, colors, strict=True)],
                    "line": {"color": colors, "width": 1.5},
                },
                text=[
                    f"{100 * (row['within_fraction'] or row['fraction']):.0f}%   {row['plan_ms']:.3g} ms"
                    for row in found
                ],
                textposition="outside",
                textfont={"size": 11},
                cliponaxis=False,
                showlegend=False,
            ),
            row=1,
            col=column,
        )
    figure.update_xaxes(range=[0, 145], tickvals=[0, 25, 50, 75, 100], ticksuffix="%", gridcolor=GRID, zeroline=False)
    figure.update_yaxes(categoryorder="array", categoryarray=names)
    figure.update_annotations(font_size=13)
    figure.update_layout(
        title={
            "text": "Simulated share of the lower bound of a step (of 100%), and time to plan it"
            f"<br><sup>{setting}. Blue: Evenload, grey: peers. "
            "Within 80 GB by storing, recomputing or offloading; hollow: does not fit, shown as if it did.</sup>",
            "x": 0.01,
        },
        margin={"l": LABELS_PX, "r": 20, "t": 100, "b": 40},
        bargap=0.25,
    )
    write_png(figure, path, width=max(1000, LABELS_PX + PANEL_PX * len(panels)), height=MARGIN_PX + ROW_PX * len(names))


def _beyond_memory(row: dict[str, Any]) -> bool:
    return row["within_fraction"] is None


def draw_growth(times_ms: dict[str, dict[int, float]], path: Path) -> None:
    """Log-log lines, a strategy each, with a line of proportional growth for the eye.

    Args:
        times_ms: per strategy, documents to milliseconds.
    """
    figure = go.Figure()
    for index, (name, points) in enumerate(times_ms.items()):
        color, dash = series_style(index)
        figure.add_trace(
            go.Scatter(
                x=list(points),
                y=list(points.values()),
                name=name,
                mode="lines+markers",
                line={"color": color, "dash": dash},
            )
        )
    slimpack = times_ms.get("slimpack", {})
    if slimpack:
        first = min(slimpack)
        figure.add_trace(
            go.Scatter(
                x=list(slimpack),
                y=[slimpack[first] * count / first for count in slimpack],
                name="proportional to documents",
                mode="lines",
                line={"color": PREDICTED, "dash": "dot", "width": 1.5},
            )
        )
    for count, limit_ms in ((512, 20), (2048, 100)):
        figure.add_trace(
            go.Scatter(
                x=[count],
                y=[limit_ms],
                name=f"target: {limit_ms} ms at {count}",
                mode="markers",
                marker={"symbol": "line-ew-open", "size": 16, "color": TARGET},
                showlegend=count == 512,
            )
        )
    figure.update_xaxes(type="log", title="documents of a global batch", gridcolor=GRID, dtick=1)
    figure.update_yaxes(type="log", title="plan and choose, ms", gridcolor=GRID, dtick=1)
    figure.update_layout(
        title={"text": "Planning time over batch size<br><sup>DP 8 x PP 4, measured, median</sup>", "x": 0.02},
        margin={"l": 70, "r": 20, "t": 80, "b": 60},
    )
    write_png(figure, path, width=860, height=520)
