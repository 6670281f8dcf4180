"""The figures of a length profile as one PNG, for papers, slides and issues.

Drawn by matplotlib, which is an extra: it needs no browser, so this also works on a cluster's login node.
"""

import os

from evenload.errors import ConfigError
from evenload.report.length_figures import COUNTED, WINDOW_CUTS, axis_end
from evenload.report.palette import LENGTH_COLORS
from evenload.report.units import format_power_of_two
from evenload.types.length_profile import LengthProfile
from evenload.types.length_unit import LengthUnit, in_unit

_INCHES = (9.0, 9.6)
_DOTS_PER_INCH = 130


def write_lengths_png(
    path: str | os.PathLike[str], title: str, profile: LengthProfile, unit: LengthUnit = "tokens"
) -> None:
    """Write three panels: shares by length class, cumulative shares, what windows cut."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            f"a PNG needs matplotlib ({error}); install it with: pip install 'evenload[png]', or use --html"
        ) from error
    figure = Figure(figsize=_INCHES, dpi=_DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    # matplotlib reads "$" as mathematics.
    figure.suptitle(title.replace("$", r"\$"), fontsize=12, fontweight="bold")
    classes, cumulative, *cuts = figure.subplots(3 if profile.windows else 2, 1)
    shares = [(name, key, [getattr(c, key) for c in profile.classes]) for key, name in COUNTED.items()]
    _grouped_bars(classes, [c.start for c in profile.classes], shares, profile, unit)
    classes.set_xlabel(in_unit("length from (tokens)", unit))
    for key, name in COUNTED.items():
        cumulative.step(
            [point.length for point in profile.cumulative],
            [100 * getattr(point, key) for point in profile.cumulative],
            where="post",
            color=LENGTH_COLORS[key],
            linewidth=1.8,
            label=in_unit(name, unit),
        )
    cumulative.set_xscale("log", base=2)
    cumulative.xaxis.set_major_formatter(lambda value, _: format_power_of_two(round(value)) if value >= 1 else "")
    cumulative.set_xlabel(in_unit("up to this length (tokens)", unit))
    panels = [(classes, "share, %"), (cumulative, "share, %")]
    for axes in cuts:
        shares = [(name, key, [getattr(cut, field) for cut in profile.windows]) for field, key, name in WINDOW_CUTS]
        _grouped_bars(axes, [cut.window for cut in profile.windows], shares, profile, unit)
        axes.set_xlabel(in_unit("context window (tokens)", unit))
        panels.append((axes, "share cut, %"))
    for axes, label in panels:
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        if axes is classes:
            _cut_outlier(axes)
        axes.grid(axis="y", color="#e6e9ee")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=9, ncols=3, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2)
    figure.savefig(path, format="png")


def _cut_outlier(axes) -> None:
    """As on the page: a bar far above all others goes on beyond the axis, with its number on it."""
    end = axis_end([bar.get_height() for bar in axes.patches])
    axes.set_ylim(top=end)
    for bar in axes.patches:
        if bar.get_height() > end:
            place = bar.get_x() + bar.get_width() / 2, end
            axes.annotate(
                f"▲ {bar.get_height():.1f} %", place, ha="center", va="bottom", fontsize=8, annotation_clip=False
            )


def _grouped_bars(
    axes, lengths: list[int], series: list[tuple[str, str, list[int]]], profile: LengthProfile, unit: LengthUnit
) -> None:
    """Bars at every length for each (name, total of the profile, counts), as shares of that total in its colour."""
    width = 0.8 / len(series)
    for position, (name, total, counts) in enumerate(series):
        center = (position - (len(series) - 1) / 2) * width
        values = [100 * count / getattr(profile, total) for count in counts]
        at = [i + center for i in range(len(lengths))]
        axes.bar(at, values, width, label=in_unit(name, unit), color=LENGTH_COLORS[total])
    labels = [format_power_of_two(length) for length in lengths]
    axes.set_xticks(range(len(labels)), labels, rotation=0 if len(labels) < 20 else 45, fontsize=8)
