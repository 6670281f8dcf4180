"""docs/planner.md's table of what changing the layout gains, simulated, from the newest rows of paper_flexpipe.csv.

python tools/make_flexpipe_gains.py      part of `make docs`; a test fails when page and rows differ
"""

import csv
from pathlib import Path
from statistics import geometric_mean

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "planner.md"
ROWS = ROOT / "benchmarks" / "results" / "paper_flexpipe.csv"
BEGIN, END = "<!-- flexpipe gains: make docs -->\n", "<!-- end of flexpipe gains -->\n"
AGAINST = {
    "static padded": ("`padded` in the static layout", "1.40 over Zero-Bubble, which pads"),
    "static best_fit": ("`best_fit` in the static layout", "1.23 over FlashAttention, which packs"),
    "static flexpipe": ("its own packing in the static layout", "-"),
    "published": ("`flexpipe` as published: least depth, no hysteresis, one step known", "-"),
    "known 1": ("itself with the coming step alone known", "-"),
    "documents only": ("itself without layers that recompute (O_plan)", "-"),
    "best fixed": ("its own packing in the best fixed layout", "-"),
}


def gains() -> str:
    """Markdown lines: a table, and what it was made of under it."""
    with ROWS.open(newline="") as file:
        rows = {(row["case"], row["metric"], row["baseline"]): row for row in csv.DictReader(file)}
    lines = ["| against | ratio | the paper's figure |", "|---|---|---|"]
    used = []
    for base, (what, paper) in AGAINST.items():
        mine = [row for (_, metric, against), row in rows.items() if (metric, against) == ("speed-up", base)]
        if not mine:
            continue
        ratios = sorted(float(row["value"]) for row in mine)
        shown = f"{geometric_mean(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f}), {len(ratios)} cells"
        lines.append(f"| {what} | {shown} | {paper} |")
        used += mine
    commits = ", ".join(sorted({f"`{row['commit']}`" for row in used}))
    return "\n".join([*lines, "", f"Simulated at commit {commits}.", ""])


def page_with_gains() -> str:
    """The page with the block replaced."""
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    return before + BEGIN + gains() + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(page_with_gains(), encoding="utf-8")
