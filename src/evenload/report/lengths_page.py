"""The page of `evenload lengths --html`: the figures of a length profile, self-contained like every report."""

import os
from html import escape
from pathlib import Path

from evenload.report.length_figures import (
    READ_CUMULATIVE,
    READ_WINDOWS,
    cumulative_lengths_figure,
    length_classes_figure,
    read_classes,
    window_cuts_figure,
)
from evenload.report.page import definitions_html, figure_html, page_html
from evenload.report.units import format_count, format_share
from evenload.types.length_profile import LengthProfile
from evenload.types.length_unit import LengthUnit, in_unit


def write_lengths_page(
    path: str | os.PathLike[str], title: str, profile: LengthProfile, unit: LengthUnit = "tokens"
) -> None:
    """Write the page, about 50 KB; the title is plain text."""
    figures = [
        (
            "classes",
            "Where documents and work are",
            read_classes(profile),
            length_classes_figure(profile, unit),
        ),
        ("cumulative", "Cumulative shares", READ_CUMULATIVE, cumulative_lengths_figure(profile, unit)),
    ]
    if profile.windows:
        figures.append(("windows", "What a window cuts", READ_WINDOWS, window_cuts_figure(profile, unit)))
    blocks = [
        figure_html(name, heading, in_unit(read, unit), figure, level=2) for name, heading, read, figure in figures
    ]
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
    return definitions_html(
        "tiles", ((name, f"{escape(value)}<small>{detail}</small>") for name, value, detail in tiles)
    )
