"""Colours of pictures: told apart by colour-blind readers, legible on white and on near-black.

Forward is blue and backward orange (the pair that survives all common colour deficiencies), with two
lightnesses for even and odd packs so that neighbours show. Split backwards keep orange for I and take brown
for W. Predicted is always hollow, dashed or grey; measured is filled and solid.
Hues after Okabe and Ito, "Color Universal Design", 2008, adjusted to contrast on both backgrounds.
"""

from typing import NamedTuple


class KindStyle(NamedTuple):
    """How tasks of one kind look: colour of even and odd packs, the text on each, and the legend's name."""

    even: str
    odd: str
    text_even: str
    text_odd: str
    name: str


KIND_STYLES = {
    "F": KindStyle("#1f6fb5", "#7ab5e6", "#ffffff", "#0b2033", "forward"),
    "B": KindStyle("#d06a12", "#f2ae69", "#ffffff", "#3b1d02", "backward"),
    "I": KindStyle("#d06a12", "#f2ae69", "#ffffff", "#3b1d02", "backward: input gradient"),
    "W": KindStyle("#7d5233", "#b58d6d", "#ffffff", "#24150a", "backward: weight gradient"),
}
IDLE = "rgba(128,134,145,0.16)"
PREDICTED = "#8a919e"
MEASURED = "#2f7fd0"
LIMIT = "#d1364c"
SERIES = ("#2f7fd0", "#e07b1a", "#1b9e77", "#b55fa5", "#b59b00", "#4fb0d8", "#8a919e", "#d1495b")
"""Runs in one picture; after these, dashes tell them apart."""
DASHES = ("solid", "dash", "dot", "dashdot")
LENGTH_COLORS = {"documents": "#2f7fd0", "tokens": "#e07b1a", "attention_pairs": "#1b9e77"}
"""What is counted over document lengths."""
# Sequential, from the first to the last pipeline rank.
_RANK_ENDS = ((47, 127, 208), (224, 140, 40))
_RANK_MIDDLE = (140, 100, 170)


def rank_color(position: float) -> str:
    """Colour of a pipeline rank: blue at 0.0 (first), violet, orange at 1.0 (last)."""
    low, high = (_RANK_ENDS[0], _RANK_MIDDLE) if position <= 0.5 else (_RANK_MIDDLE, _RANK_ENDS[1])
    share = position * 2 if position <= 0.5 else position * 2 - 1
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(low, high, strict=True))
    return f"rgb({red},{green},{blue})"


def series_style(index: int) -> tuple[str, str]:
    """Colour and dash of the run with that index."""
    return SERIES[index % len(SERIES)], DASHES[(index // len(SERIES)) % len(DASHES)]
