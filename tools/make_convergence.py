"""The picture of docs/benchmarks.md about documents that wait and the loss: curves, and the loss beside the papers'.

    python tools/make_convergence.py        part of `make docs`; a test compares the committed picture

From the rows of benchmarks/results/convergence_curves.csv, of a run that was measured again the newest. Left: held-out
loss by documents seen, mean of the seeds. Right: of every order how far losses at the end are from those of plain order
with the same seed, a dot a seed, what WLB-LLM prints a diamond. Training losses are of the last fifth of the steps.
"""

import statistics
from collections import defaultdict
from html import escape
from typing import NamedTuple

from rows import ROOT, read

TARGET = ROOT / "docs" / "pictures" / "convergence.svg"
WIDTH, HEIGHT, TOP, BOTTOM = 960, 372, 78, 318
LEFT, CURVES_RIGHT, NAMES_LEFT, DOTS_LEFT, DOTS_RIGHT = 52, 470, 510, 640, 940
PLAIN = "plain"
COLOURS = {PLAIN: "#1c232b", "wlb published": "#2f7fd0", "wlb balanced": "#1b9e77", "fixed 8": "#d06a12"}
PAPER = {"wlb published": 0.0, "fixed 8": 0.016}
"""WLB-LLM Fig. 16: "almost the same trend", and "1.6% on average", both of training loss against packing one batch."""


class Point(NamedTuple):
    """A row of the curves."""

    step: int
    documents: int
    tokens: int
    train_loss: float
    held_out_loss: float


Curves = dict[str, dict[str, list[Point]]]
"""Points by strategy and seed, by step."""


def curves() -> Curves:
    """The newest rows."""
    newest = {(row["strategy"], row["seed"], int(row["step"])): row for row in read("convergence_curves")}
    result: Curves = defaultdict(lambda: defaultdict(list))
    for (strategy, seed, step), row in sorted(newest.items(), key=lambda item: item[0][2]):
        losses = float(row["train_loss"]), float(row["held_out_loss"])
        result[strategy][seed].append(Point(step, int(row["documents"]), int(row["tokens"]), *losses))
    # A benchmark that was stopped has not trained all orders of its last seed.
    common = set.intersection(*(set(seeds) for seeds in result.values()))
    return {strategy: {seed: seeds[seed] for seed in sorted(common)} for strategy, seeds in result.items()}


def last_fifth(points: list[Point]) -> float:
    """Training loss of the last fifth of the steps, a token."""
    inside = [point for point in points if 5 * point.step > 4 * points[-1].step]
    before = points[-len(inside) - 1].tokens
    weights = [
        point.tokens - earlier for point, earlier in zip(inside, (before, *(p.tokens for p in inside)), strict=False)
    ]
    return sum(w * point.train_loss for w, point in zip(weights, inside, strict=True)) / sum(weights)


def over_plain(found: Curves, strategy: str) -> dict[str, list[float]]:
    """By kind of loss how far each seed's is from plain order's, as a share."""
    pairs = [(own, found[PLAIN][seed]) for seed, own in found[strategy].items()]
    return {
        "train": [last_fifth(own) / last_fifth(plain) - 1 for own, plain in pairs],
        "held out": [own[-1].held_out_loss / plain[-1].held_out_loss - 1 for own, plain in pairs],
    }


def picture(found: Curves) -> str:
    """As SVG."""
    height = HEIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        'font-size="13" role="img" aria-label="Held-out loss by documents seen under four orders, and how far losses '
        "at the end are from those of plain order, beside WLB-LLM's figures\">",
        "<style>.grid{stroke:#d5d9dd}.zero{stroke:#4c5661}.tick{font-size:12px;fill:#4c5661}.head{font-weight:bold}"
        "</style>",
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        *_curves(found),
        *_dots(found),
    ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _curves(found: Curves) -> list[str]:
    means = {strategy: _mean_curve(list(seeds.values())) for strategy, seeds in found.items()}
    most = max(documents for points in means.values() for documents, _ in points)
    losses = [loss for points in means.values() for _, loss in points]
    low, high = int(min(losses) * 2) / 2, -int(-max(losses) * 2) / 2 + 0.5
    x = lambda documents: LEFT + documents / most * (CURVES_RIGHT - LEFT)  # noqa: E731
    y = lambda loss: BOTTOM - (loss - low) / (high - low) * (BOTTOM - TOP)  # noqa: E731
    parts = ['<text class="head" x="12" y="22">Held-out loss by documents seen, nats a token</text>']
    for half in range(int(2 * low), int(2 * high) + 1):
        at = y(half / 2)
        parts.append(f'<line class="grid" x1="{LEFT}" y1="{at:.1f}" x2="{CURVES_RIGHT}" y2="{at:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{half / 2:.1f}</text>')
    for thousands in range(0, most // 1000 + 1, 2):
        at, label = x(1000 * thousands), f"{thousands},000" if thousands else "0"
        parts.append(f'<text class="tick" x="{at:.1f}" y="{BOTTOM + 18}" text-anchor="middle">{label}</text>')
    middle = (LEFT + CURVES_RIGHT) // 2
    parts.append(f'<text class="tick" x="{middle}" y="{BOTTOM + 38}" text-anchor="middle">documents seen</text>')
    for number, (strategy, points) in enumerate(means.items()):
        colour, left = COLOURS[strategy], 12 + 112 * number
        path = " ".join(f"{x(documents):.1f},{y(loss):.1f}" for documents, loss in points)
        dash = "" if strategy == PLAIN else f' stroke-dasharray="7 {7 + 3 * number}" stroke-dashoffset="{5 * number}"'
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2.2"{dash}/>')
        parts.append(f'<rect x="{left}" y="38" width="14" height="5" fill="{colour}"/>')
        parts.append(f'<text x="{left + 19}" y="45">{escape(strategy)}</text>')
    return parts


def _mean_curve(seeds: list[list[Point]]) -> list[tuple[int, float]]:
    """(documents, held-out loss) of each step, means of seeds."""
    return [
        (round(statistics.mean(p.documents for p in same)), statistics.mean(p.held_out_loss for p in same))
        for same in zip(*seeds, strict=True)
    ]


def _dots(found: Curves) -> list[str]:
    kinds = {"train": "training loss", "held out": "held-out loss"}
    shares = {strategy: over_plain(found, strategy) for strategy in found if strategy != PLAIN}
    values = [value for own in shares.values() for losses in own.values() for value in losses] + [*PAPER.values()]
    low, high = (int(100 * min(values) - 1) / 100, int(100 * max(values) + 1) / 100)
    x = lambda share: DOTS_LEFT + (share - low) / (high - low) * (DOTS_RIGHT - DOTS_LEFT)  # noqa: E731
    parts = [
        f'<text class="head" x="{NAMES_LEFT}" y="22">Loss at the end over that of plain order</text>',
        f'<text class="tick" x="{NAMES_LEFT}" y="45">a dot a seed; diamond: training loss in WLB-LLM Fig. 16</text>',
    ]
    for hundredth in range(round(100 * low), round(100 * high) + 1):
        at, label = x(hundredth / 100), f"{hundredth:+d} %" if hundredth else "0"
        kind = "grid" if hundredth else "zero"
        parts.append(f'<line class="{kind}" x1="{at:.1f}" y1="{TOP - 8}" x2="{at:.1f}" y2="{BOTTOM}"/>')
        parts.append(f'<text class="tick" x="{at:.1f}" y="{BOTTOM + 18}" text-anchor="middle">{label}</text>')
    row = (BOTTOM - TOP) / sum(len(own) for own in shares.values())
    lines = [(strategy, kind, losses) for strategy, own in shares.items() for kind, losses in own.items()]
    for number, (strategy, kind, losses) in enumerate(lines):
        at, colour = TOP + row * (number + 0.5), COLOURS[strategy]
        if kind == "train":
            parts.append(f'<text x="{NAMES_LEFT}" y="{at - 2:.1f}" font-weight="bold">{escape(strategy)}</text>')
        parts.append(f'<text class="tick" x="{NAMES_LEFT}" y="{at + 13:.1f}">{kinds[kind]}</text>')
        parts += [
            f'<circle cx="{x(one):.1f}" cy="{at + 6:.1f}" r="5" fill="{colour}" fill-opacity=".7"/>' for one in losses
        ]
        if kind == "train" and strategy in PAPER:
            place = f'transform="translate({x(PAPER[strategy]):.1f} {at + 6:.1f})"'
            parts.append(f'<path d="M0-9L9 0 0 9-9 0Z" {place} fill="none" stroke="#b00020" stroke-width="2"/>')
    return parts


if __name__ == "__main__":
    TARGET.write_text(picture(curves()), encoding="utf-8")
