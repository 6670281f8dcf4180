"""Layouts over the steps of a run: which one every step ran in, why, and the predicted seconds that were compared."""

from collections.abc import Sequence
from html import escape

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from evenload.report.layout_table import format_action, format_conditions, format_predicted
from evenload.report.palette import MEASURED, PREDICTED, SERIES
from evenload.report.units import format_seconds
from evenload.types.layout_decision import LayoutDecision

_TOP_PX, _BOTTOM_PX, _SECONDS_PX, _ROW_PX = 44, 50, 170, 30
_LOOKS = {1: (MEASURED, "circle", 7), 2: (SERIES[4], "square", 8), 3: (SERIES[7], "triangle-up", 12),
          4: (SERIES[2], "triangle-down", 12)}  # fmt: skip
_NAMES = {1: "① kept", 2: "② kept, saving memory", 3: "③ switched to fit", 4: "④ switched to be faster"}


def layout_figure(decisions: Sequence[LayoutDecision]) -> go.Figure:
    """Two panels over the steps: the layout, marked by the case of FlexPipe's Fig. 7; and T of the conditions, a known
    step (how many are known falls towards the end of a run)."""
    layouts = list(dict.fromkeys(one.layout for one in decisions))
    rows_px = _ROW_PX * (len(layouts) + 1)
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.06, row_heights=[rows_px, _SECONDS_PX])
    steps = [one.step for one in decisions]
    figure.add_trace(
        go.Scatter(
            x=steps,
            y=[escape(one.layout, quote=False) for one in decisions],
            mode="lines",
            line={"color": PREDICTED, "width": 2, "shape": "hvh"},
            hoverinfo="skip",
            showlegend=False,
        ),
        row=1,
        col=1,
    )
    for case, name in _NAMES.items():
        of_case = [one for one in decisions if one.case == case]
        if not of_case:
            continue
        color, symbol, size = _LOOKS[case]
        figure.add_trace(
            go.Scatter(
                x=[one.step for one in of_case],
                y=[escape(one.layout, quote=False) for one in of_case],
                mode="markers",
                name=name,
                marker={"color": color, "symbol": symbol, "size": size},
                customdata=[_told(one) for one in of_case],
                hovertemplate="%{customdata}<extra></extra>",
            ),
            row=1,
            col=1,
        )
    saving = [one.save_s if one.keep_s is None else None for one in decisions]
    for name, totals, color, dash in (
        ("T(keep)", [one.keep_s for one in decisions], MEASURED, "solid"),
        ("T(save)", saving, SERIES[4], "dot"),
        ("T(new) + T(switch)", [_switched_s(one) for one in decisions], SERIES[1], "dash"),
    ):
        seconds = [None if s is None else s / one.known_steps for s, one in zip(totals, decisions, strict=True)]
        if any(value is not None for value in seconds):
            figure.add_trace(
                go.Scatter(
                    x=steps,
                    y=seconds,
                    name=name,
                    mode="lines+markers",
                    line={"color": color, "dash": dash, "width": 2},
                    marker={"size": 4},
                    hovertemplate=f"{name} %{{y:.4~s}}s<extra></extra>",
                ),
                row=2,
                col=1,
            )
    figure.update_layout(
        height=_TOP_PX + _BOTTOM_PX + rows_px + _SECONDS_PX,
        margin={"l": min(220, 40 + 7 * max(map(len, layouts), default=0)), "r": 16, "t": _TOP_PX, "b": _BOTTOM_PX},
        hovermode="closest",
    )
    categories = [escape(name, quote=False) for name in layouts]
    figure.update_yaxes(
        type="category", categoryorder="array", categoryarray=categories[::-1], showgrid=False, zeroline=False, row=1
    )
    figure.update_yaxes(
        title_text="predicted a step", rangemode="tozero", tickformat="~s", ticksuffix="s", zeroline=False, row=2
    )
    figure.update_xaxes(showgrid=False, zeroline=False)
    figure.update_xaxes(title_text="step", row=2)
    return figure


def _switched_s(decision: LayoutDecision) -> float | None:
    return None if decision.new_s is None else decision.new_s + decision.switch_s


def _told(decision: LayoutDecision) -> str:
    lines = [
        f"<b>step {decision.step}</b>: {escape(format_action(decision))}, {format_conditions(decision)}",
        f"T(keep) {format_predicted(decision.keep_s)}, T(save) {format_predicted(decision.save_s)}",
    ]
    candidates = {"documents": decision.save_documents_s, "layers": decision.save_layers_s}
    if any(seconds is not None for seconds in candidates.values()):
        of_each = [f"by {name} {format_predicted(seconds)}" for name, seconds in candidates.items()]
        lines.append(f"saving memory in this step: {', '.join(of_each)}")
    if decision.other:
        lines.append(
            f"{escape(decision.other)}: T(new) {format_predicted(decision.new_s)}, "
            f"T(switch) {format_seconds(decision.switch_s)}"
        )
    if decision.measured_switch_s is not None:
        lines.append(f"the switch took {format_seconds(decision.measured_switch_s)}, measured")
    return "<br>".join([*lines, escape(decision.why)])
