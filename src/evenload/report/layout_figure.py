"""Layouts over the steps of a run: which one every step ran in, why, and the predicted seconds that were compared."""

import itertools
from collections.abc import Sequence

from evenload.report.axes import Scale, Tick, round_ticks, step_ticks, tick_labels
from evenload.report.figure import Axes, Curves, Figure, legend, names_width_px, panel
from evenload.report.layout_table import format_action, format_conditions, format_predicted
from evenload.report.palette import MEASURED, PREDICTED, SERIES
from evenload.report.svg_marks import dot, line, triangle
from evenload.report.units import format_seconds
from evenload.types.layout_decision import LayoutDecision

_SECONDS_PX, _ROW_PX = 170, 30
_COLORS = {1: MEASURED, 2: SERIES[4], 3: SERIES[7], 4: SERIES[2]}
_NAMES = {1: "① kept", 2: "② kept, saving memory", 3: "③ switched to fit ▲", 4: "④ switched to be faster ▼"}


def layout_figure(decisions: Sequence[LayoutDecision]) -> Figure:
    """Two panels over the steps: the layout, marked by the case of FlexPipe's Fig. 7; and T of the conditions, a known
    step (how many are known falls towards the end of a run)."""
    layouts = list(dict.fromkeys(one.layout for one in decisions))
    first, last = decisions[0].step, decisions[-1].step
    room = 0.5 if first == last else 0.012 * (last - first)
    x = Scale(first - room, last + room)
    left_px = names_width_px(layouts, most_px=150)
    cases = [case for case in _NAMES if any(one.case == case for one in decisions)]
    seconds = _seconds(decisions)
    label = f"layout of steps {first} to {last}: {', '.join(layouts)}"
    body = (
        legend((_NAMES[case], _COLORS[case], "fill") for case in cases)
        + _which(decisions, layouts, x, left_px, label)
        + legend((name, color, dash) for name, color, dash, _ in seconds)
        + _compared(decisions, seconds, x, left_px)
    )
    return Figure(body=body, label=label)


def _which(decisions: Sequence[LayoutDecision], layouts: Sequence[str], x: Scale, left_px: int, label: str) -> str:
    lanes = {name: i for i, name in enumerate(layouts)}
    axes = Axes(
        x=x,
        y=Scale(len(layouts) - 0.5, -0.5),
        x_ticks=(),
        y_ticks=[Tick(at, name) for name, at in lanes.items()],
        left_px=left_px,
        height_px=_ROW_PX * (len(layouts) + 1),
    )
    places = [(x.share(one.step), axes.y_px(lanes[one.layout])) for one in decisions]
    marks = [line(_halfway(places), axes.height_px, PREDICTED)]
    for one, (at, y_px) in zip(decisions, places, strict=True):
        color, tip = _COLORS[one.case], _told(one)
        if one.case in (3, 4):
            marks.append(triangle(at, y_px, color, up=one.case == 3, tip=tip))
        else:
            marks.append(dot(at, y_px, color, radius_px=3.6 if one.case == 1 else 4.6, tip=tip))
    return panel(axes, marks, label)


def _seconds(decisions: Sequence[LayoutDecision]) -> list[tuple[str, str, str, list[float | None]]]:
    """(name, colour, dash, seconds a known step) of what was compared anywhere."""
    saving = [one.save_s if one.keep_s is None else None for one in decisions]
    found = []
    for name, totals, color, dash in (
        ("T(keep)", [one.keep_s for one in decisions], MEASURED, "solid"),
        ("T(save)", saving, SERIES[4], "dot"),
        ("T(new) + T(switch)", [_switched_s(one) for one in decisions], SERIES[1], "dash"),
    ):
        seconds = [None if s is None else s / one.known_steps for s, one in zip(totals, decisions, strict=True)]
        if any(value is not None for value in seconds):
            found.append((name, color, dash, seconds))
    return found


def _compared(
    decisions: Sequence[LayoutDecision],
    seconds: Sequence[tuple[str, str, str, list[float | None]]],
    x: Scale,
    left_px: int,
) -> str:
    most = max((value for *_, values in seconds for value in values if value is not None), default=1.0)
    at = round_ticks(0, most * 1.06, 4)
    axes = Axes(
        x=x,
        y=Scale(0, most * 1.06),
        x_ticks=step_ticks(decisions[0].step, decisions[-1].step),
        y_ticks=[Tick(value, label) for value, label in zip(at, tick_labels(at, "s"), strict=True)],
        x_title="step",
        y_title="predicted a step",
        left_px=left_px,
        height_px=_SECONDS_PX,
    )
    marks = []
    for _, color, dash, values in seconds:
        points = [
            (x.share(one.step), None if value is None else axes.y_px(value))
            for one, value in zip(decisions, values, strict=True)
        ]
        marks.append(line(points, axes.height_px, color, dash))
        marks += [dot(x_share, y_px, color, radius_px=2.2) for x_share, y_px in points if y_px is not None]
    curves = Curves("step", [one.step for one in decisions], "s", [(n, c, v) for n, c, _, v in seconds])
    return panel(axes, marks, "predicted seconds a step of staying, saving memory and switching", curves)


def _halfway(places: Sequence[tuple[float, float]]) -> list[tuple[float, float | None]]:
    """Layouts change halfway between two steps."""
    found: list[tuple[float, float | None]] = [*places[:1]]
    for (left, before_px), (right, y_px) in itertools.pairwise(places):
        middle = (left + right) / 2
        found += [(middle, before_px), (middle, y_px), (right, y_px)]
    return found


def _switched_s(decision: LayoutDecision) -> float | None:
    return None if decision.new_s is None else decision.new_s + decision.switch_s


def _told(decision: LayoutDecision) -> str:
    lines = [
        f"step {decision.step}: {format_action(decision)}, {format_conditions(decision)}",
        f"T(keep) {format_predicted(decision.keep_s)}, T(save) {format_predicted(decision.save_s)}",
    ]
    candidates = {"documents": decision.save_documents_s, "layers": decision.save_layers_s}
    if any(seconds is not None for seconds in candidates.values()):
        of_each = [f"by {name} {format_predicted(seconds)}" for name, seconds in candidates.items()]
        lines.append(f"saving memory in this step: {', '.join(of_each)}")
    if decision.other:
        switch = format_seconds(decision.switch_s)
        lines.append(f"{decision.other}: T(new) {format_predicted(decision.new_s)}, T(switch) {switch}")
    if decision.measured_switch_s is not None:
        lines.append(f"the switch took {format_seconds(decision.measured_switch_s)}, measured")
    return "\n".join([*lines, decision.why])
