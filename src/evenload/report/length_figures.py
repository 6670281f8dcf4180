"""Pictures of document lengths: shares by length class, cumulative shares, what windows cut.

All length axes are logarithmic. Colours follow the three things counted: documents blue, tokens orange, attention
work green.
"""

import plotly.graph_objects as go

from evenload.report.palette import LENGTH_COLORS
from evenload.report.units import format_power_of_two
from evenload.types.length_profile import LengthProfile
from evenload.types.length_unit import LengthUnit, in_unit

READ_CLASSES = (
    "Documents by length, in classes of powers of two. Blue counts documents, orange their tokens, green the "
    "(query, key) pairs of causal attention. Where green stands far right of blue, a few long documents decide how "
    "long a step takes, and packing by token counts leaves devices waiting."
)
READ_CUMULATIVE = (
    "The share of everything that lies in documents up to a length. The wider the gap between the curves, the more "
    "there is to win by balancing work instead of documents."
)
READ_WINDOWS = (
    "What a context window does to this data. <b>Blue</b>: documents that do not fit. <b>Orange</b>: tokens after the "
    "window, lost where documents are truncated. <b>Green</b>: attention between pieces, lost where documents are "
    "split. Evenload trains documents whole up to <code>--context</code>."
)
_HEIGHT_PX = 340
COUNTED = {"documents": "documents", "tokens": "tokens", "attention_pairs": "attention work"}
"""What is counted over lengths: fields of `LengthProfile`, and their names."""
WINDOW_CUTS = (
    ("longer_documents", "documents", "documents longer"),
    ("tokens_beyond", "tokens", "tokens beyond"),
    ("attention_pairs_across", "attention_pairs", "attention across pieces"),
)
"""What a window cuts: field of `WindowCut`, of the total that it is a share of, and name."""
_CUT_MEANINGS = (
    "of documents are longer",
    "of tokens lie beyond: truncating loses them",
    "of attention is across pieces: splitting loses it",
)


def length_classes_figure(profile: LengthProfile, unit: LengthUnit = "tokens") -> go.Figure:
    """Share of documents, tokens and attention work by length class, three bars a class."""
    figure = go.Figure()
    starts = [format_power_of_two(c.start) for c in profile.classes]
    labels = [f"{format_power_of_two(c.start)} to {format_power_of_two(c.stop)}" for c in profile.classes]
    for key, name in COUNTED.items():
        counts = [getattr(c, key) for c in profile.classes]
        hover = f"%{{customdata[0]}} tokens: %{{y:.2%}} of {name} (%{{customdata[1]}})"
        details = [[label, f"{count:,}"] for label, count in zip(labels, counts, strict=True)]
        figure.add_trace(_bars(profile, starts, counts, key, details, in_unit(name, unit), in_unit(hover, unit)))
    _dress(figure, in_unit("length from (tokens; every class ends where the next begins)", unit), "share")
    _group_bars(figure, gap=0.22)
    return figure


def cumulative_lengths_figure(profile: LengthProfile, unit: LengthUnit = "tokens") -> go.Figure:
    """Share of documents, tokens and attention work in documents up to a length."""
    figure = go.Figure()
    lengths = [point.length for point in profile.cumulative]
    for key, name in COUNTED.items():
        figure.add_trace(
            go.Scatter(
                x=lengths,
                y=[getattr(point, key) for point in profile.cumulative],
                name=in_unit(name, unit),
                mode="lines",
                line={"color": LENGTH_COLORS[key], "width": 2.2, "shape": "hv"},
                hovertemplate=in_unit(f"{name} %{{y:.2%}}<extra></extra>", unit),
            )
        )
    _dress(figure, in_unit("up to this length (tokens)", unit), "share")
    figure.update_layout(hovermode="x unified")
    low, high = profile.shortest.bit_length() - 1, profile.longest.bit_length()
    ticks = [2**k for k in range(low, high + 1, 1 if high - low < 12 else 2)]
    figure.update_xaxes(
        type="log",
        tickvals=ticks,
        ticktext=[format_power_of_two(tick) for tick in ticks],
        unifiedhovertitle={"text": in_unit("up to %{x:,} tokens", unit)},
    )
    return figure


def window_cuts_figure(profile: LengthProfile, unit: LengthUnit = "tokens") -> go.Figure:
    """What each window cuts: documents longer than it, tokens beyond it, attention across its pieces."""
    figure = go.Figure()
    windows = [format_power_of_two(cut.window) for cut in profile.windows]
    for (key, total, name), meaning in zip(WINDOW_CUTS, _CUT_MEANINGS, strict=True):
        counts = [getattr(cut, key) for cut in profile.windows]
        hover = f"window %{{x}}: %{{y:.2%}} {meaning} (%{{customdata}})"
        details = [f"{count:,}" for count in counts]
        figure.add_trace(_bars(profile, windows, counts, total, details, in_unit(name, unit), in_unit(hover, unit)))
    _dress(figure, in_unit("context window (tokens)", unit), "share cut")
    _group_bars(figure, gap=0.28)
    return figure


def _bars(
    profile: LengthProfile, at: list[str], counts: list[int], total: str, details: list, name: str, hover: str
) -> go.Bar:
    """Counts as shares of a total of the profile, in its colour."""
    return go.Bar(
        x=at,
        y=[count / getattr(profile, total) for count in counts],
        customdata=details,
        name=name,
        marker={"color": LENGTH_COLORS[total], "line": {"width": 0}},
        hovertemplate=f"{hover}<extra></extra>",
    )


def _group_bars(figure: go.Figure, gap: float) -> None:
    figure.update_layout(barmode="group", bargap=gap, bargroupgap=0.02)
    # As text: a class is a place on the axis, not a number between others.
    figure.update_xaxes(type="category")


def _dress(figure: go.Figure, x_title: str, y_title: str) -> None:
    figure.update_layout(height=_HEIGHT_PX, margin={"l": 64, "r": 16, "t": 40, "b": 52}, hovermode="closest")
    figure.update_xaxes(title_text=x_title, showgrid=False, zeroline=False)
    figure.update_yaxes(title_text=y_title, tickformat=".0%", rangemode="tozero", zeroline=False)
