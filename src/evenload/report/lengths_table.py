"""What `evenload lengths` shows in a terminal: totals, a histogram over length classes, and what windows cut.

Classes are powers of two, so the histogram's axis is logarithmic. Each class has three bars, for documents, tokens
and attention work, because they lie in different places: that difference is why packing matters.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from evenload.report.units import format_count, format_power_of_two, format_share
from evenload.types.counted import counted
from evenload.types.length_profile import HeaviestHalf, LengthProfile
from evenload.types.length_unit import LengthUnit, in_unit

_EIGHTHS = ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")
_BAR_COLORS = {"documents": "blue", "tokens": "dark_orange", "attention": "green4"}
# Columns of a bar.
_LEAST_BAR, _MOST_BAR = 4, 20


@dataclass(frozen=True)
class LengthsTable:
    """A rich renderable; see the module."""

    profile: LengthProfile
    unit: LengthUnit = "tokens"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from (Text(in_unit(line.plain, self.unit), style=line.style) for line in _totals(self.profile))
        yield Text()
        yield _histogram(self.profile, options.max_width, console, options, self.unit)
        if self.profile.windows:
            yield _windows(self.profile, self.unit)
            yield Text(
                in_unit(
                    "work: query-key pairs of causal attention. Truncating to a window loses the tokens beyond, "
                    "splitting the work across pieces.",
                    self.unit,
                ),
                style="bright_black",
            )


def _totals(profile: LengthProfile) -> Iterator[Text]:
    yield Text(f"{counted(profile.documents, 'document')}, {profile.tokens:,} tokens", style="bold")
    yield Text(
        f"length in tokens: min {profile.shortest:,}, median {profile.median:,}, mean {profile.mean:,.1f}, "
        f"p90 {profile.p90:,}, p99 {profile.p99:,}, max {profile.longest:,}"
    )
    yield Text(f"half of the tokens lie in {_half(profile.half_of_tokens, profile)}")
    yield Text(f"half of the attention work lies in {_half(profile.half_of_attention, profile)}")


def _half(half: HeaviestHalf, profile: LengthProfile) -> str:
    share = format_share(half.documents / profile.documents)
    which = "the longest document" if half.documents == 1 else f"the {half.documents:,} longest documents"
    return f"{which} ({share}), of {half.shortest:,} tokens{'' if half.documents == 1 else ' and more'}"


def _histogram(
    profile: LengthProfile, max_width: int, console: Console, options: ConsoleOptions, unit: LengthUnit
) -> Table:
    """As wide as the terminal; a cut number is a wrong number, so where it is narrow the last columns are left out."""
    for is_wide in (True, False):
        bare = Measurement.get(
            console, options.update(max_width=10_000), _class_table(profile, 1, is_wide, unit)
        ).maximum
        width = 1 + (max_width - bare) // 3
        if width >= _LEAST_BAR:
            break
    return _class_table(profile, min(_MOST_BAR, max(1, width)), is_wide, unit)


def _class_table(profile: LengthProfile, width: int, is_wide: bool, unit: LengthUnit) -> Table:
    table = _bare_table()
    table.add_column("length", justify="right", no_wrap=True)
    table.add_column("docs", justify="right", no_wrap=True)
    for name in ("of docs", "of tokens", "of work"):
        table.add_column(in_unit(f"share\n{name}", unit), justify="right", no_wrap=True)
        table.add_column("", min_width=width, max_width=width, no_wrap=True)
    if is_wide:
        for name in ("docs", "tokens", "work"):
            table.add_column(in_unit(f"{name}\nto here", unit), justify="right", no_wrap=True)
    totals = (profile.documents, profile.tokens, profile.attention_pairs)
    counts = [(c.documents, c.tokens, c.attention_pairs) for c in profile.classes]
    largest = [max(column) for column in zip(*counts, strict=True)]
    running = [0, 0, 0]
    for one, parts in zip(profile.classes, counts, strict=True):
        running = [before + part for before, part in zip(running, parts, strict=True)]
        cells = []
        for part, total, most, color in zip(parts, totals, largest, _BAR_COLORS.values(), strict=True):
            cells += [Text(format_share(part / total)), Text(bar(part / most, width), style=color)]
        if is_wide:
            cells += [Text(format_share(part / total)) for part, total in zip(running, totals, strict=True)]
        classes = f"{format_power_of_two(one.start)} to {format_power_of_two(one.stop)}"
        table.add_row(Text(classes), Text(f"{one.documents:,}"), *cells)
    return table


def _windows(profile: LengthProfile, unit: LengthUnit) -> Table:
    table = _bare_table()
    of_docs, of_tokens = ("docs\nlonger", "share of\ndocs"), ("their\ntokens", "tokens\nbeyond", "share of\ntokens")
    for heading in ("window", *of_docs, *of_tokens, "work across\npieces"):
        table.add_column(in_unit(heading, unit), justify="right", no_wrap=True)
    for cut in profile.windows:
        table.add_row(
            format_power_of_two(cut.window),
            f"{cut.longer_documents:,}",
            format_share(cut.longer_documents / profile.documents),
            format_share(cut.longer_tokens / profile.tokens),
            format_count(cut.tokens_beyond),
            format_share(cut.tokens_beyond / profile.tokens),
            format_share(cut.attention_pairs_across / profile.attention_pairs),
            style="bright_black" if not cut.longer_documents else None,
        )
    return table


def _bare_table() -> Table:
    return Table(header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))


def bar(share: float, width: int) -> str:
    """A horizontal bar of `share` (0 to 1) of `width` columns, in eighths of a column; visible unless it is 0."""
    eighths = round(share * width * 8)
    if share > 0:
        eighths = max(1, eighths)
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8]
