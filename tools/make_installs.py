"""docs/install.md's table of environments that were tried, from the newest rows of benchmarks/fresh_install.py.

python tools/make_installs.py      part of `make docs`; a test fails when page and rows differ
"""

import csv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "install.md"
RESULTS = ROOT / "benchmarks" / "results" / "results.csv"
BEGIN, END = "<!-- installs: make docs -->\n", "<!-- end of installs -->\n"
PATHS = ("plan", "train", "check", "bench", "loop")

Tried = dict[str, dict[str, str]]


def tried() -> dict[str, Tried]:
    """By environment, by metric, the newest row."""
    found: dict[str, Tried] = {}
    with RESULTS.open(newline="") as file:
        for row in csv.DictReader(file):
            if row["benchmark"] == "fresh install":
                found.setdefault(row["case"], {})[row["metric"]] = row
    return found


def installs_table() -> str:
    """Markdown lines."""
    heads = ("Python", "from", "PATH", "torch", "MB downloaded", "MB installed", "s to install", *PATHS, "tried")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for case, rows in sorted(tried().items()):
        # "Python 3.12.1, wheel [train], no compiler, torch 2.13.0+cu130, as in make"
        python, source, path, torch, *how = case.split(", ")
        with_torch = torch != "no torch"
        cells = [python.removeprefix("Python "), ", ".join([source, *(["as in `make`"] if how else [])]), path]
        cells += [torch.removeprefix("torch ") if with_torch else "none"]
        cells += [f"{float(rows[name]['value']):,.0f}" if name in rows else "-" for name in ("download", "disk")]
        cells.append(f"{float(rows['install']['value']):.0f}")
        for name in PATHS:
            told = name in rows and (with_torch or name == "plan")
            cells.append(f"{float(rows[name]['value']):.0f} s" if told else "-")
        cells.append(f"{rows['disk']['date']}, `{rows['disk']['commit']}`")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def page_with_table() -> str:
    """The page with the block replaced."""
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    return before + BEGIN + installs_table() + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(page_with_table(), encoding="utf-8")
