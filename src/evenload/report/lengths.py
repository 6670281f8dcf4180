"""Show document lengths in a terminal and on a page (`evenload lengths`).

The bar of a class far above all others is broken: one document of ten million tokens holds most of the attention work.
"""

import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from evenload.report import svg
from evenload.report.page import figure_html, numbers_html, page_html
from evenload.report.run_report import cards_html
from evenload.report.svg import LENGTH_COLORS, Axes, Figure, NumberTable, Scale
from evenload.report.table import bare_table
from evenload.types.run import LengthProfile
from evenload.types.text import LengthUnit, counted, format_count, format_power_of_two, format_share, in_unit

READ_CLASSES = (
    "Documents by length, in classes of powers of two: how many documents, their tokens, and the (query, key) pairs of "
    "causal attention, each with an axis of its own. Where the third stands far right of the first, a few long "
    "documents decide how long a step takes, and packing by token counts leaves devices waiting."
)
_READ_BROKEN = " A <b>broken bar</b> is longer than drawn; its share stands on it."
READ_WINDOWS = (
    "What a context window does to this data: documents that do not fit; tokens after the window, lost where documents "
    "are truncated; attention between pieces, lost where documents are split. Evenload trains documents whole up to "
    "<code>--context</code>."
)
COUNTED = {"documents": "documents", "tokens": "tokens", "attention_pairs": "attention work"}
"""Fields of `LengthProfile` that are counted over lengths, and their names."""
WINDOW_CUTS = (
    ("longer_documents", "documents", "documents longer"),
    ("tokens_beyond", "tokens", "tokens beyond"),
    ("attention_pairs_across", "attention_pairs", "attention across pieces"),
)
"""What a window cuts: field of `WindowCut`, field of its total, and name."""
_CLASS_PX = 104
_MOST_OVER_SECOND = 2.5
"""A class this many times the next one has a broken bar."""
_MARGIN = 1.3


def axis_end(shares: Sequence[float]) -> float:
    """Return the end of a histogram's axis: above the largest share, or above the second where that is far smaller."""
    ordered = sorted(shares, reverse=True)
    second = ordered[1] if len(ordered) > 1 else 0.0
    is_alone = second > 0 and ordered[0] > _MOST_OVER_SECOND * second
    return (second * 1.5 if is_alone else ordered[0]) * _MARGIN or 1.0


def read_classes(profile: LengthProfile) -> str:
    """Return how to read `length_classes_figure`."""
    is_broken = any(max(shares) > axis_end(shares) for shares in (_shares(profile, key) for key in COUNTED))
    return READ_CLASSES + (_READ_BROKEN if is_broken else "")


def length_classes_figure(profile: LengthProfile) -> Figure:
    """Draw the share of documents, tokens and attention work by length class, a panel each."""
    starts = [format_power_of_two(c.start) for c in profile.classes]
    names = [f"{format_power_of_two(c.start)} to {format_power_of_two(c.stop)}" for c in profile.classes]
    panels, columns = [], [names]
    for key, name in COUNTED.items():
        shares, counts = _shares(profile, key), [getattr(one, key) for one in profile.classes]
        is_last, end = key == "attention_pairs", axis_end(shares)
        axes = Axes(
            x=Scale(-0.5, len(shares) - 0.5),
            y=Scale(0, end),
            x_ticks=svg.named_ticks(dict(enumerate(starts)), 8) if is_last else (),
            y_ticks=svg.value_ticks(0, end, "%", 3),
            x_title="length from (tokens; every class ends where the next begins)" if is_last else "",
            height_px=_CLASS_PX,
        )
        marks = []
        for i, (share, count) in enumerate(zip(shares, counts, strict=True)):
            tip = f"{names[i]} tokens: {share:.2%} of {name} ({count:,})"
            marks += _class_bar(axes, i, share, LENGTH_COLORS[key], tip)
        most = max(range(len(shares)), key=shares.__getitem__)
        label = f"share of {name} by length: most, {format_share(shares[most])}, from {names[most]} tokens"
        panels.append(f'<div class="panel-title">{name}</div>{svg.panel(axes, marks, label)}')
        columns.append([f"{count:,}, {format_share(share)}" for count, share in zip(counts, shares, strict=True)])
    numbers = NumberTable(("length (tokens)", *COUNTED.values()), tuple(zip(*columns, strict=True)))
    return Figure("".join(panels), numbers)


def window_cuts(profile: LengthProfile) -> NumberTable:
    """Return what each window cuts: documents longer than it, tokens beyond it, attention across its pieces."""
    rows = []
    for cut in profile.windows:
        parts = [(getattr(cut, key), getattr(profile, total)) for key, total, _ in WINDOW_CUTS]
        cells = (f"{count:,}, {format_share(count / total)}" for count, total in parts)
        rows.append((format_power_of_two(cut.window), *cells))
    return NumberTable(("window (tokens)", *(name for _, _, name in WINDOW_CUTS)), tuple(rows))


def _shares(profile: LengthProfile, key: str) -> list[float]:
    return [getattr(one, key) / getattr(profile, key) for one in profile.classes]


def _class_bar(axes: Axes, at: int, share: float, color: str, tip: str) -> list[str]:
    """Draw a bar with its share over it; two gaps show that it is longer than the axis."""
    if not share:
        return []
    span, is_broken = (axes.x.share(at - 0.4), axes.x.share(at + 0.4)), share > axes.y.high
    top = 16.0 if is_broken else min(axes.y_px(share), axes.height_px - 1)  # at least one pixel is seen
    marks = [svg.rect(span, top, axes.height_px - top, color, tip)]
    if is_broken:
        marks += [svg.rect((span[0] - 0.002, span[1] + 0.002), y, 2.5, "var(--card)") for y in (top + 12, top + 18)]
    number = f"{100 * share:.1f}" if share >= 0.0005 else "<0.1"
    shown, kind = (f"{number} %", "on-bar broken") if is_broken else (number, "on-bar")
    return [*marks, svg.text(axes.x.share(at), top - 4, shown, kind=kind)]


_EIGHTHS = ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")
_BAR_COLORS = ("blue", "dark_orange", "green4")
# Columns of a bar.
_LEAST_BAR, _MOST_BAR = 4, 20


@dataclass(frozen=True)
class LengthsTable:
    """Renders totals, a histogram, and what windows cut; a narrow terminal lacks the last columns."""

    profile: LengthProfile
    unit: LengthUnit = "tokens"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        profile = self.profile
        for i, total in enumerate(_totals(profile)):
            yield Text(in_unit(total, self.unit), style="bold" if i == 0 else "")
        yield Text()
        for is_wide in (True, False):
            bare = _class_table(profile, 1, is_wide, self.unit)
            needed = Measurement.get(console, options.update(max_width=10_000), bare).maximum
            width = 1 + (options.max_width - needed) // 3
            if width >= _LEAST_BAR:
                break
        yield _class_table(profile, min(_MOST_BAR, max(1, width)), is_wide, self.unit)
        if profile.windows:
            yield _windows(profile, self.unit)
            note = "work: query-key pairs of causal attention. Truncating to a window loses the tokens beyond, "
            yield Text(in_unit(f"{note}splitting the work across pieces.", self.unit), style="bright_black")


def _totals(profile: LengthProfile) -> Iterator[str]:
    yield f"{counted(profile.documents, 'document')}, {profile.tokens:,} tokens"
    yield (
        f"length in tokens: min {profile.shortest:,}, median {profile.median:,}, mean {profile.mean:,.1f}, "
        f"p90 {profile.p90:,}, p99 {profile.p99:,}, max {profile.longest:,}"
    )
    for name, half in (("tokens lie", profile.half_of_tokens), ("attention work lies", profile.half_of_attention)):
        share = format_share(half.documents / profile.documents)
        which, more = f"the {half.documents:,} longest documents", " and more"
        if half.documents == 1:
            which, more = "the longest document", ""
        yield f"half of the {name} in {which} ({share}), of {half.shortest:,} tokens{more}"


def _class_table(profile: LengthProfile, width: int, is_wide: bool, unit: LengthUnit) -> Table:
    headings = ["length", "docs"]
    for name in ("docs", "tokens", "work"):
        headings += [in_unit(f"share\nof {name}", unit), ""]
    if is_wide:
        headings += [in_unit(f"{name}\nto here", unit) for name in ("docs", "tokens", "work")]
    table = _bare_table(headings, width)
    counts = [[getattr(one, key) for one in profile.classes] for key in COUNTED]
    totals = [getattr(profile, key) for key in COUNTED]
    running = [itertools.accumulate(column) for column in counts]
    for one, *parts in zip(profile.classes, *counts, strict=True):
        cells = []
        for part, total, column, color in zip(parts, totals, counts, _BAR_COLORS, strict=True):
            cells += [Text(format_share(part / total)), Text(bar(part / max(column), width), style=color)]
        if is_wide:
            cells += [Text(format_share(next(sums) / total)) for sums, total in zip(running, totals, strict=True)]
        classes = f"{format_power_of_two(one.start)} to {format_power_of_two(one.stop)}"
        table.add_row(Text(classes), Text(f"{one.documents:,}"), *cells)
    return table


def _windows(profile: LengthProfile, unit: LengthUnit) -> Table:
    of_docs, of_tokens = ("docs\nlonger", "share of\ndocs"), ("their\ntokens", "tokens\nbeyond", "share of\ntokens")
    headings = ("window", *of_docs, *of_tokens, "work across\npieces")
    table = _bare_table([in_unit(heading, unit) for heading in headings])
    for cut in profile.windows:
        longer, tokens = cut.longer_documents / profile.documents, cut.longer_tokens / profile.tokens
        beyond, across = cut.tokens_beyond / profile.tokens, cut.attention_pairs_across / profile.attention_pairs
        documents = format_power_of_two(cut.window), f"{cut.longer_documents:,}", format_share(longer)
        cells = format_share(tokens), format_count(cut.tokens_beyond), format_share(beyond), format_share(across)
        table.add_row(*documents, *cells, style="bright_black" if not cut.longer_documents else None)
    return table


def _bare_table(headings: Sequence[str], bar_width: int = 0) -> Table:
    """Make a table; columns without a heading are bars."""
    table = bare_table("", *headings, left=("",), is_narrow=True)
    table.columns[0].justify = "right"
    for column in table.columns:
        column.min_width = column.max_width = None if column.header else bar_width
    return table


def bar(share: float, width: int) -> str:
    """Draw a horizontal bar of `share` (0 to 1) of `width` columns, in eighths of a column; visible unless it is 0."""
    eighths = max(1 if share > 0 else 0, round(share * width * 8))
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8]


def length_blocks(profile: LengthProfile, unit: LengthUnit, heading: str, level: int = 3) -> list[str]:
    """Return in HTML a figure of the shares by class, and a table of what windows cut where there are some."""
    classes = length_classes_figure(profile)
    blocks = [figure_html("classes", heading, read_classes(profile), classes, level=level)]
    if profile.windows:
        title = "What a window cuts"
        blocks += [f"<h{level}>{title}</h{level}>", numbers_html(title, window_cuts(profile)), f"<p>{READ_WINDOWS}</p>"]
    return [in_unit(block, unit) for block in blocks]


def write_lengths_page(
    path: str | os.PathLike[str], title: str, profile: LengthProfile, unit: LengthUnit = "tokens"
) -> None:
    """Write the page, about 50 KB; the title is plain text."""
    blocks = length_blocks(profile, unit, "Where documents and work are", level=2)
    head = [f"<h1>{escape(title)}</h1>", in_unit(_tiles(profile), unit)]
    Path(path).write_text(page_html(title, head + blocks, unit=unit), encoding="utf-8")


def _tiles(profile: LengthProfile) -> str:
    half, work = profile.half_of_tokens, profile.half_of_attention
    share, work_share = (format_share(one.documents / profile.documents) for one in (half, work))
    tiles = (
        ("documents", f"{profile.documents:,}", ""),
        ("tokens", format_count(profile.tokens), f"{profile.tokens:,}"),
        ("median length", f"{profile.median:,}", f"mean {profile.mean:,.0f}"),
        ("90 % are at most", f"{profile.p90:,}", f"99 %: {profile.p99:,}"),
        ("longest", f"{profile.longest:,}", f"shortest {profile.shortest:,}"),
        ("half of the tokens", share, f"of documents, from {half.shortest:,} on"),
        ("half of the attention", work_share, f"of documents, from {work.shortest:,} on"),
    )
    return cards_html((name, escape(value), detail) for name, value, detail in tiles)
