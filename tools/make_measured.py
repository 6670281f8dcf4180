"""The table of measurements in docs/measured.md, and the README's few, from the newest rows of benchmarks/results.

python tools/make_measured.py        part of `make docs`; a test fails when pages and rows differ
"""

import csv
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
README, PAGE = ROOT / "README.md", ROOT / "docs" / "measured.md"
RESULTS = ROOT / "benchmarks" / "results" / "results.csv"
BEGIN, END = "<!-- measured: make docs -->\n", "<!-- end of measured -->\n"
IN_README = ("replay-time", "replay-memory", "own-time", "demo", "shared-outlier")
"""The lines that the README has, too."""
MEASURED = "speed-up, measured"
_SHAPED = "gloo over a link of "
"""Of a case in which transfers have a link with a speed of its own (benchmarks/shaped_link.py)."""
_OVERLAPS = (
    ("reduction", "time, sums", "reduction ", "sums of gradients beside packs"),
    ("reduction", "time, both", "gather ", "the same and gathers of weights, of these"),
)
"""Benchmark, the metric of the step's time, how those of what is hidden begin, and what runs beside what."""


class Rows(dict[tuple[str, str, str], dict[str, str]]):
    """Rows by benchmark, case and metric; `read` are those that were looked at, so that a figure can name its own."""

    def __init__(self, rows: dict[tuple[str, str, str], dict[str, str]]) -> None:
        super().__init__(rows)
        self.read: set[tuple[str, str, str]] = set()

    def __getitem__(self, key: tuple[str, str, str]) -> dict[str, str]:
        self.read.add(key)
        return super().__getitem__(key)

    def value(self, benchmark: str, case: str, metric: str) -> float:
        """Of one row."""
        return float(self[benchmark, case, metric]["value"])

    def values_of(self, benchmark: str, metric: str) -> list[float]:
        """Of all cases."""
        return [float(self[key]["value"]) for key in self if (key[0], key[2]) == (benchmark, metric)]


class Figure(NamedTuple):
    """A line of the page.

    Args:
        name: of its anchor on the page, which the README links to.
        benchmark: the file in benchmarks/ that measures it.
        keys: benchmark, case and metric of the rows that it was made of.
    """

    name: str
    what: str
    figure: str
    benchmark: str
    keys: tuple[tuple[str, str, str], ...]

    def command(self) -> str:
        """What measures it again."""
        links = {case.partition(_SHAPED)[2].partition(" ")[0] for _, case, _ in self.keys} - {""}
        shaped = "".join(f"benchmarks/shaped_link.py {rate}gbit " for rate in links)
        return f"python {shaped}benchmarks/{self.benchmark}.py --append"

    def rows_named(self) -> str:
        """Which rows of results.csv these are: benchmark, metrics, and the case or how many."""
        benchmark = self.keys[0][0]
        metrics = ", ".join(f"*{metric}*" for metric in dict.fromkeys(metric for _, _, metric in self.keys))
        cases = list(dict.fromkeys(case for _, case, _ in self.keys))
        return f"`{benchmark}`, {metrics}, {cases[0] if len(cases) == 1 else f'{len(cases)} cases'}"


def measured_table() -> str:
    """Markdown lines; every figure names its rows and its command, the line below the table machines and commits."""
    rows = newest_rows()
    shown = figures(rows)
    commits: dict[str, set[str]] = {}
    for r in (rows[key] for one in shown for key in one.keys):
        commits.setdefault(f"{r['cpu']}, {r['cores']} cores, torch {r['torch']}", set()).add(r["commit"])
    machines = [f"{machine} (commits {', '.join(sorted(of))})" for machine, of in sorted(commits.items())]
    lines = ["| what | figure | command | rows |", "|---|---|---|---|"]
    lines += [
        f'| <a id="{one.name}"></a>{one.what} | {one.figure} '
        f"| [`{one.command()}`](../benchmarks/{one.benchmark}.py) | {one.rows_named()} |"
        for one in shown
    ]
    return "\n".join([*lines, "", "Measured on " + "; ".join(machines) + ".", ""])


def short_table() -> str:
    """The README's lines, each figure a link to its rows and command."""
    lines = ["| measured, on 2 cores | figure |", "|---|---|"]
    lines += [
        f"| {one.what} | [{one.figure}](docs/measured.md#{one.name}) |"
        for one in figures(newest_rows())
        if one.name in IN_README
    ]
    return "\n".join([*lines, ""])


def figures(rows: Rows) -> list[Figure]:
    """All lines, in the page's order."""
    # The last one: earlier demos ran other batches.
    demo = [case for benchmark, case, _ in rows if benchmark == "demo" and case.startswith("slimpack")][-1]
    outlier = next(case for benchmark, case, metric in rows if (benchmark, metric) == ("dp_merge", MEASURED))
    lines: list[tuple[str, str, str, Callable[[], str]]] = [
        ("replay-time", "replay", "replay: time of loss and gradients, against plain transformers and autograd",
         lambda: _spread(rows, "replay", "time")),
        ("recompute-time", "replay", "recompute: time, against the same", lambda: _spread(rows, "recompute", "time")),
        ("replay-memory", "replay", "replay: peak memory, against the same",
         lambda: _spread(rows, "replay", "peak memory")),
        ("own-time", "step_overhead",
         "a step's time that is Evenload's own, not tensor work: packs of 2K to 8K tokens, 2 to 376 documents",
         lambda: "{:.1%} to {:.1%}".format(*_extremes(rows, "step", "own"))),
        ("simulator", "simulator", "simulator: tasks a second, and against its reference in plain Python",
         lambda: _simulator(rows)),
        ("planning", "planning", "planning `slimpack`: 512 and 2,048 documents, DP 8 × PP 4, against `best_fit`",
         lambda: _planning(rows)),
        ("slices", "attention", "slices: attention of 8 slices, against one causal call",
         lambda: f"{rows.value('attention', '8 slices of one document of 8,192 tokens', 'time'):.2f}×"),
        ("demo", "demo", "demo: step time of `best_fit` over `slimpack`, measured (predicted)",
         lambda: _speed_up(rows, "demo", demo)),
        ("demo-prediction", "demo", "demo: step time of `slimpack` over its prediction",
         lambda: f"{rows.value('demo', demo, 'step time'):.2f}×"),
        ("shared-outlier", "dp_merge",
         "one document of 20 times the mean, two replicas: step time apart over shared, measured (predicted)",
         lambda: _speed_up(rows, "dp_merge", outlier)),
        ("shared-outlier-prediction", "dp_merge", "the same, shared: step time over its prediction",
         lambda: f"{rows.value('dp_merge', outlier, 'step time'):.2f}×"),
        ("context-ranks", "context_parallel",
         "`skrull` on 4 context ranks, against sharing all documents: bytes moved, time; its two long-tailed tables",
         lambda: _context_ranks(rows)),
        ("swinging-phases", "swinging",
         "phases of short and of long documents: time in every layout over `flexpipe`'s, measured (predicted)",
         lambda: _swinging(rows)),
        *_overlaps(rows),
    ]  # fmt: skip
    found = []
    for name, benchmark, what, figure in lines:
        rows.read.clear()
        text = figure()
        found.append(Figure(name, what, text, benchmark, tuple(sorted(rows.read))))
    return found


def _overlaps(rows: Rows) -> list[tuple[str, str, str, Callable[[], str]]]:
    """Of every kind of transfer that was measured over a link with a speed of its own."""
    lines = []
    for benchmark, time, prefix, what in _OVERLAPS:
        for case in [case for b, case, metric in rows if (b, metric) == (benchmark, time) and _SHAPED in case]:
            shape, link = case.partition(",")[0], case.partition(_SHAPED)[2].partition(",")[0]
            name = re.sub(r"[^a-z0-9]+", "-", f"{benchmark} {prefix}{shape} {link}".lower())
            told = (
                f"{what} ({shape}, {link}): step time against nothing beside packs; hidden (predicted); hidden "
                "seconds told over predicted"
            )
            lines.append((name, benchmark, told, functools.partial(_overlap, rows, benchmark, case, time, prefix)))
    return lines


def _overlap(rows: Rows, benchmark: str, case: str, time: str, prefix: str) -> str:
    account = "account, hidden" if prefix else "account"
    share, predicted, told = (
        rows.value(benchmark, case, f"{prefix}{name}") for name in ("hidden", "hidden, predicted", account)
    )
    return f"{rows.value(benchmark, case, time):.2f}×; {share:.0%} ({predicted:.0%}); {told:.2f}×"


def _extremes(rows: Rows, benchmark: str, metric: str) -> tuple[float, float]:
    values = rows.values_of(benchmark, metric)
    return min(values), max(values)


def _spread(rows: Rows, benchmark: str, metric: str) -> str:
    return "{:.2f}-{:.2f}×".format(*_extremes(rows, benchmark, metric))


def _speed_up(rows: Rows, benchmark: str, case: str) -> str:
    return f"{rows.value(benchmark, case, MEASURED):.2f}× ({rows.value(benchmark, case, 'speed-up, predicted'):.2f}×)"


def _simulator(rows: Rows) -> str:
    case = "simulate: 4,096 tasks, 8 stages, 256 packs each way"
    millions = rows.value("simulator", case, "tasks per second") / 1e6
    return f"{millions:.0f} M, {rows.value('simulator', case, 'speed-up'):.0f}×"


def _planning(rows: Rows) -> str:
    cases = [f"slimpack, {count} documents, dp=8 pp=4" for count in ("512", "2,048")]
    return ", ".join(
        f"{rows.value('planning', case, 'plan and choose'):.0f} ms ({rows.value('planning', case, 'time'):.1f}×)"
        for case in cases
    )


def _context_ranks(rows: Rows) -> str:
    tails = [
        case for b, case, m in rows if b == "context" and m == "bytes" and case.endswith("dacp") and "QA" not in case
    ]
    moved, took = ([rows.value("context", case, metric) for case in tails] for metric in ("bytes", "time"))
    return f"{min(moved):.2f}-{max(moved):.2f}×, {min(took):.2f}-{max(took):.2f}×"


def _swinging(rows: Rows) -> str:
    """Of a run whose layout changes, against each of its layouts."""
    cases = {metric: case for benchmark, case, metric in rows if benchmark == "swinging"}
    layouts = [metric.removeprefix("speed-up over ").removesuffix(", measured") for metric in cases
               if metric.startswith("speed-up over ") and metric.endswith(", measured")]  # fmt: skip

    def ratio(name: str, kind: str) -> float:
        metric = f"speed-up over {name}, {kind}"
        return rows.value("swinging", cases[metric], metric)

    return ", ".join(f"{name} {ratio(name, 'measured'):.2f}× ({ratio(name, 'predicted'):.2f}×)" for name in layouts)


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
