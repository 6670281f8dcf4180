"""Colours of pictures: told apart by colour-blind readers, legible on white and on near-black.

Forward is blue and backward orange (the pair that survives all common colour deficiencies), with two
lightnesses for even and odd packs so that neighbours show. Split backwards keep orange for I and take brown
for W. Predicted is always hollow, dashed or grey; measured is filled and solid.
Hues after Okabe and Ito, "Color Universal Design", 2008, adjusted to contrast on both backgrounds.
"""

from typing import NamedTuple


class KindStyle(NamedTuple):
    """How tasks of one kind look: colour of even and odd packs and of those too thin to tell apart, the text on each
    of the first two, and the legend's name."""

    even: str
    odd: str
    thin: str
    text_even: str
    text_odd: str
    name: str


KIND_STYLES = {
    "F": KindStyle("#1f6fb5", "#7ab5e6", "#4c92cd", "#ffffff", "#0b2033", "forward"),
    "B": KindStyle("#d06a12", "#f2ae69", "#e18c3d", "#ffffff", "#3b1d02", "backward"),
    "I": KindStyle("#d06a12", "#f2ae69", "#e18c3d", "#ffffff", "#3b1d02", "backward: input gradient"),
    "W": KindStyle("#7d5233", "#b58d6d", "#996f50", "#ffffff", "#24150a", "backward: weight gradient"),
}
PREDICTED = "#8a919e"
MEASURED = "#2f7fd0"
SERIES = ("#2f7fd0", "#e07b1a", "#1b9e77", "#b55fa5", "#b59b00", "#4fb0d8", "#8a919e", "#d1495b")
"""Runs in one picture; after these, dashes tell them apart."""
DASHES = ("solid", "dash", "dot", "dashdot")
MEMORY_COLORS = {
    "weights": "#3f6fa5",
    "gradients": "#86bdea",
    "optimizer_state": "#2a4a70",
    "activations_replay": "#e07b1a",
    "activations_recompute": "#f2ae69",
    "activations_offload": "#c9a77c",
    "keys_and_values": "#1b9e77",
    "key_value_gradients": "#7fd6b8",
    "gathered_keys_and_values": "#17795a",
    "weight_gradient_inputs": "#8f5fc0",
    "recompute_buffers": "#c8a3e0",
    "offload_buffers": "#e0b7cf",
    "layer_buffers": "#98a2b0",
    "head_logits": "#c53347",
}
"""`MEMORY_KINDS`: what stays blue, activations orange, keys and values green, buffers violet, grey and red."""
SIDE_STYLES = {
    "recompute": ("#00000055", "recompute (front of a backward)"),
    "offload": ("#17a398", "offload to the host"),
    "reload": ("#c2438f", "reload from the host"),
    "reduction": ("#9d7fc9", "gradient reduction"),
    "optimizer": ("#6a4f96", "optimizer"),
    "gather": ("#b9a4d8", "gather of updated weights"),
}
"""`SIDE_KINDS` that are drawn: colour, and the legend's name."""
LENGTH_COLORS = {"documents": "#2f7fd0", "tokens": "#e07b1a", "attention_pairs": "#1b9e77"}
"""What is counted over document lengths."""
CAUSE_COLORS = {
    "useful_s": "#2f7fd0",
    "kernels_s": "#86bdea",
    "padding_s": "#e3c53d",
    "recompute_s": "#b59b00",
    "offload_s": "#7d6d0a",
    "tp_communication_s": "#2fb38a",
    "cp_communication_s": "#17795a",
    "cp_imbalance_s": "#7fd6b8",
    "warmup_s": "#f2a0a8",
    "cooldown_s": "#e0707c",
    "imbalance_s": "#c53347",
    "stage_imbalance_s": "#87192f",
    "dependency_s": "#8f5fc0",
    "p2p_s": "#5cc4c9",
    "dp_imbalance_s": "#e8833a",
    "reduction_s": "#7d5233",
    "optimizer_s": "#b58d6d",
    "switch_s": "#5d6673",
}
"""Causes of `TimeSplit`: useful work blue, overheads of computing light blue to yellow, transfers green, waiting red,
violet and orange, the end of the step brown."""


def series_style(index: int) -> tuple[str, str]:
    return SERIES[index % len(SERIES)], DASHES[(index // len(SERIES)) % len(DASHES)]


def text_on(color: str) -> str:
    """Black or white, whichever is easier to read on a colour: the larger contrast of WCAG 2."""
    luminance = _luminance(color)
    return "#000000" if (luminance + 0.05) / 0.05 > 1.05 / (luminance + 0.05) else "#ffffff"


def _luminance(color: str) -> float:
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
