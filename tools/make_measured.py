"""The table of measurements in docs/measured.md, and the README's few, from the newest rows of benchmarks/results.

python tools/make_measured.py        part of `make docs`; a test fails when pages and rows differ
"""

import csv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README, PAGE = ROOT / "README.md", ROOT / "docs" / "measured.md"
RESULTS = ROOT / "benchmarks" / "results" / "results.csv"
BEGIN, END = "<!-- measured: make docs -->\n", "<!-- end of measured -->\n"
IN_README = (
    "demo: step time of `best_fit`",
    "one document of 20 times",
    "replay: ",
    "a step's time that is Evenload's own",
)
"""How the lines begin that the README has, too."""


class Rows(dict[tuple[str, str, str], dict[str, str]]):
    """Rows by benchmark, case and metric; `read` are those that were looked at, so that the page names no others."""

    def __init__(self, rows: dict[tuple[str, str, str], dict[str, str]]) -> None:
        super().__init__(rows)
        self.read: set[tuple[str, str, str]] = set()

    def __getitem__(self, key: tuple[str, str, str]) -> dict[str, str]:
        self.read.add(key)
        return super().__getitem__(key)

    def values_of(self, benchmark: str, metric: str) -> list[float]:
        """Of all cases."""
        return [float(self[key]["value"]) for key in self if (key[0], key[2]) == (benchmark, metric)]


def measured_table() -> str:
    """Markdown lines; every figure names its benchmark, and the line below the table its machine and commit."""
    rows = newest_rows()
    shown = figures(rows)
    commits: dict[str, set[str]] = {}
    for r in (rows[key] for key in sorted(rows.read)):
        commits.setdefault(f"{r['cpu']}, {r['cores']} cores, torch {r['torch']}", set()).add(r["commit"])
    machines = [f"{machine} (commits {', '.join(sorted(of))})" for machine, of in sorted(commits.items())]
    lines = ["| what | figure | command |", "|---|---|---|"]
    lines += [
        f"| {what} | {figure} | [benchmarks/{name}.py](../benchmarks/{name}.py) |" for what, figure, name in shown
    ]
    return "\n".join([*lines, "", "Measured on " + "; ".join(machines) + ".", ""])


def short_table() -> str:
    """The README's lines."""
    chosen = [row for row in figures(newest_rows()) if row[0].startswith(IN_README)]
    lines = ["| measured, on 2 cores | figure |", "|---|---|"]
    return "\n".join([*lines, *(f"| {what} | {figure} |" for what, figure, _ in chosen), ""])


def figures(rows: Rows) -> list[tuple[str, str, str]]:
    """What, figure, and the benchmark that measures it."""

    def value(benchmark: str, case: str, metric: str) -> float:
        return float(rows[benchmark, case, metric]["value"])

    def spread(benchmark: str, metric: str) -> str:
        values = rows.values_of(benchmark, metric)
        return f"{min(values):.2f}-{max(values):.2f}×"

    def percent(benchmark: str, metric: str) -> str:
        values = rows.values_of(benchmark, metric)
        return f"{min(values):.1%} to {max(values):.1%}"

    tasks = "4,096 tasks, 8 stages, 256 packs each way"
    # The last one: earlier demos ran other batches.
    demo = [case for b, case, _ in rows if b == "demo" and case.startswith("slimpack")][-1]
    tails = [
        case for b, case, m in rows if b == "context" and m == "bytes" and case.endswith("dacp") and "QA" not in case
    ]
    moved, took = ([value("context", case, metric) for case in tails] for metric in ("bytes", "time"))
    outlier = next(case for b, case, metric in rows if b == "dp_merge" and metric == "speed-up, measured")
    return [
        (
            "replay: time of loss and gradients, against plain transformers and autograd",
            spread("replay", "time"),
            "replay",
        ),
        ("recompute: time, against the same", spread("recompute", "time"), "replay"),
        ("replay: peak memory, against the same", spread("replay", "peak memory"), "replay"),
        (
            "a step's time that is Evenload's own, not tensor work: packs of 2K to 8K tokens, 2 to 376 documents",
            percent("step", "own"),
            "step_overhead",
        ),
        (
            "simulator: tasks a second, and against its reference in plain Python",
            f"{value('simulator', f'simulate: {tasks}', 'tasks per second') / 1e6:.0f} M, "
            f"{value('simulator', f'simulate: {tasks}', 'speed-up'):.0f}×",
            "simulator",
        ),
        (
            "planning `slimpack`: 512 and 2,048 documents, DP 8 × PP 4, against `best_fit`",
            ", ".join(
                f"{value('planning', f'slimpack, {n} documents, dp=8 pp=4', 'plan and choose'):.0f} ms "
                f"({value('planning', f'slimpack, {n} documents, dp=8 pp=4', 'time'):.1f}×)"
                for n in ("512", "2,048")
            ),
            "planning",
        ),
        (
            "slices: attention of 8 slices, against one causal call",
            f"{value('attention', '8 slices of one document of 8,192 tokens', 'time'):.2f}×",
            "attention",
        ),
        (
            "demo: step time of `best_fit` over `slimpack`, measured (predicted)",
            f"{value('demo', demo, 'speed-up, measured'):.2f}× ({value('demo', demo, 'speed-up, predicted'):.2f}×)",
            "demo",
        ),
        (
            "demo: step time of `slimpack` over its prediction",
            f"{value('demo', demo, 'step time'):.2f}×",
            "demo",
        ),
        (
            "one document of 20 times the mean, two replicas: step time apart over shared, measured (predicted)",
            f"{value('dp_merge', outlier, 'speed-up, measured'):.2f}× "
            f"({value('dp_merge', outlier, 'speed-up, predicted'):.2f}×)",
            "dp_merge",
        ),
        (
            "the same, shared: step time over its prediction",
            f"{value('dp_merge', outlier, 'step time'):.2f}×",
            "dp_merge",
        ),
        (
            "`skrull` on 4 context ranks, against sharing all documents: bytes moved, time; its two long-tailed tables",
            f"{min(moved):.2f}-{max(moved):.2f}×, {min(took):.2f}-{max(took):.2f}×",
            "context_parallel",
        ),
        *_swinging(rows),
    ]


def _swinging(rows: Rows) -> list[tuple[str, str, str]]:
    """The line of a run whose layout changes, once it was measured."""
    ratios = {key[2]: float(rows[key]["value"]) for key in rows if key[0] == "swinging"}
    layouts = [metric.removeprefix("speed-up over ").removesuffix(", measured") for metric in ratios
               if metric.startswith("speed-up over ") and metric.endswith(", measured")]  # fmt: skip
    if not layouts:
        return []
    figures = [
        f"{name} {ratios[f'speed-up over {name}, measured']:.2f}× ({ratios[f'speed-up over {name}, predicted']:.2f}×)"
        for name in layouts
    ]
    what = "phases of short and of long documents: time in every layout over `flexpipe`'s, measured (predicted)"
    return [(what, ", ".join(figures), "swinging")]


def newest_rows() -> Rows:
    """The last row of every benchmark, case and metric."""
    with RESULTS.open(newline="") as file:
        return Rows({(row["benchmark"], row["case"], row["metric"]): row for row in csv.DictReader(file)})


def with_table(page: Path, table: str) -> str:
    """A page as it should be."""
    before, rest = page.read_text(encoding="utf-8").split(BEGIN)
    return before + BEGIN + table + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE, measured_table()), encoding="utf-8")
    README.write_text(with_table(README, short_table()), encoding="utf-8")
