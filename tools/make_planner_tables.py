"""Tables of docs/planner.md from the newest rows: documents that wait, HBSA's times, ideas that pay, exact solutions.

python tools/make_planner_tables.py      part of `make docs`; a test fails when page and rows differ
"""

import csv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "planner.md"
RESULTS = ROOT / "benchmarks" / "results"
TABLES = {"WLB-like lognormal": "WLB-like, clipped lognormal"}
"""Names of tables of lengths that say more than their file's."""
CHANGES = (
    ("asymmetric cuts, list", "no gain, or a loss of a point", "asymmetric, list"),
    ("symmetric cuts, static order injecting forwards", "a few points behind the list", "symmetric, word injecting"),
    ("asymmetric cuts, static order injecting forwards", "better than symmetric only inside the static order",
     "asymmetric, word injecting"),
    ("symmetric cuts, static order catching up", "far behind", "symmetric, word catching up"),
    ("whole documents, list", "-", "whole documents, list"),
    ("forward first after a backward", "either way by at most a point", "list, forward first after a backward"),
    ("look-ahead 3", "adds to W split", "look-ahead 3"),
    ("token weight 2", "gains half a point", "token weight 2"),
    ("tapered ends", "gain half a point to one (asymmetric)", "tapered ends"),
    ("W split", "gains 1 to 3 points", "W split"),
    ("2 virtual stages", "gain 1 to 2 points", "2 virtual stages"),
    ("2 virtual stages and W split", "gain 3 to 5 points", "2 virtual stages, W split"),
    ("no shared documents", "up to a point lost", "no shared documents"),
    ("shared above 1.0 alone, as printed", "-", "shared above 1.0 alone, as printed"),
    ("shared above 0.4 alone", "-", "shared above 0.4 alone"),
    ("shared above 0.2 alone", "-", "shared above 0.2 alone"),
    ("not shared, dealt by forward time alone", "no difference to speak of", "not shared, dealt by forward"),
    ("all activations stored", "-", "policy replay"),
    ("all recomputed", "-", "policy recompute"),
    ("all offloaded", "needed for 150B", "policy offload"),
    ("unlimited memory", "gains 1 to 6 points", "memory unlimited"),
    ("`auto`", "-", "auto"),
    ("`auto`, 2 virtual stages", "-", "auto, 2 virtual stages"),
)  # fmt: skip
"""What is changed, what the prototype had found, and the metric of ablation.csv."""
LOSSES = (
    ("static order instead of list, pack durations 10 % off", "loses 5 to 18 %", "noise 0.1: static loses"),
    ("the same, 20 % off", "-", "noise 0.2: static loses"),
    ("recorded list orders, pack durations 10 % off", "lose at most 0.4 %", "noise 0.1: recorded list loses"),
    ("the same, 20 % off", "-", "noise 0.2: recorded list loses"),
)
PROBLEMS = {
    "variable-length packing": "variable-length packing",
    "DP assignment": "DP assignment",
    "slice packing": "slice packing",
    "fixed-length packing": "fixed-length packing",
    "DACP": "DACP (Skrull eq. 1-7), cp 8",
    "GDS": "GDS (Skrull eq. 8-11), dp 2, cp 4",
}

Rows = list[dict[str, str]]


def waiting_table() -> str:
    """Imbalance and delay of both release rules of `wlb`."""
    rows = _newest("wlb_delay.csv")
    figures = {(row["case"], row["metric"]): float(row["value"]) for row in rows}
    lines = ["| table | N | `balance`: imbalance, delay | `queues`: imbalance, delay |", "|---|---|---|---|"]
    # "docs, N=32, release balance"
    for cell in dict.fromkeys(row["case"].partition(", release ")[0] for row in rows):
        table, _, count = cell.partition(", N=")
        of_rules = []
        for rule in ("balance", "queues"):
            case = f"{cell}, release {rule}"
            of_rules.append(f"{figures[case, 'imbalance']:.3f}, {figures[case, 'mean token delay']:.2f}")
        lines.append(f"| {TABLES.get(table, f'`{table}`')} | {count} | {' | '.join(of_rules)} |")
    return "\n".join([*lines, "", _source(rows, "wlb_delay"), ""])


def hbsa_table() -> str:
    """Milliseconds and mappings of HBSA, and of trying all where that ends."""
    newest: dict[tuple[str, str], dict[str, str]] = {}
    with (RESULTS / "paper_flexpipe.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            if "," not in row["case"]:  # those of simulated cells have commas
                newest[row["case"], row["metric"]] = row
    lines = [
        "| case | HBSA | mappings priced | splits of layers there are | all of them tried |",
        "|---|---|---|---|---|",
    ]
    for case in dict.fromkeys(case for case, _ in newest):
        figure = {metric: float(row["value"]) for (held, metric), row in newest.items() if held == case}
        splits = figure["splits of layers in all"]
        tried = f"{figure['exhaustive'] / 1e3:.1f} s, gap {figure['gap']:.1%}" if "exhaustive" in figure else "-"
        counts = (f"{figure['mappings priced']:.0f}", f"{splits:,.0f}" if splits < 1e6 else f"{splits:.1e}")
        lines.append(_cells(case, f"{figure['HBSA']:.0f} ms", *counts, tried))
    return "\n".join([*lines, "", _source(list(newest.values()), "paper_flexpipe"), ""])


def ideas_table() -> str:
    """Every change to the base: percentage points of the lower bound, or per cent lost to wrong durations."""
    rows = _newest("ablation.csv")
    cases = list(dict.fromkeys(row["case"] for row in rows))
    figures = {(row["metric"], row["case"]): float(row["value"]) for row in rows}

    def points(metric: str, case: str) -> str:
        # Rows of older commits call the static order by another word.
        found = next((name for name in (metric, metric.replace("word", "static")) if (name, case) in figures), None)
        if found is None:
            return "-"
        if (f"{metric}: beyond memory", case) in figures:
            return "over memory"
        return f"{round(100 * (figures[found, case] - figures['base', case]), 1) or 0:+.1f}".replace("+0.0", "0.0")

    def loss(metric: str, case: str) -> str:
        if (metric, case) not in figures:
            return "-"
        return f"loses {round(figures[metric, case], 3) or 0:.1%}".replace("loses -", "gains ")

    # "llama-13b, dp=4 cp=2 pp=4 tp=4, 256K, 1024 documents, 3 batches, simulated"
    heads = [f"{case.split(', ')[0]}, {case.split(', ')[2]}: {case.split(', ')[1]}" for case in cases]
    base = [f"{figures['base', case]:.1%} of the bound" for case in cases]
    lines = [_cells("change to the base", "the prototype's finding", *heads), "|---" * (2 + len(cases)) + "|"]
    lines.append(_cells("the base", "-", *base))
    for what, finding, metric in CHANGES:
        lines.append(_cells(what, finding, *(points(metric, case) for case in cases)))
    for what, finding, metric in LOSSES:
        lines.append(_cells(what, finding, *(loss(metric, case) for case in cases)))
    return "\n".join([*lines, "", _source(rows, "ablation"), ""])


def gaps_table() -> str:
    """Heuristics against optima, over all tables of lengths and numbers of documents."""
    newest = {}
    with (RESULTS / "exact_gaps.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            newest[row["table"], row["documents"], row["problem"], row["heuristic"]] = row
    lines = [
        "| problem | heuristic | proved / drawn | mean gap | largest gap | share optimal |",
        "|---|---|---|---|---|---|",
    ]
    for problem, heuristic in dict.fromkeys(key[2:] for key in newest):
        own = [row for key, row in newest.items() if key[2:] == (problem, heuristic)]
        proved = [int(row["proved"]) for row in own]

        def mean(column: str, own: Rows = own, proved: list[int] = proved) -> float:
            weighed = (float(row[column]) * count for row, count in zip(own, proved, strict=True) if count)
            return sum(weighed) / sum(proved)

        largest = max(float(row["max_gap"]) for row, count in zip(own, proved, strict=True) if count)
        drawn = sum(int(row["instances"]) for row in own)
        lines.append(
            _cells(
                PROBLEMS[problem],
                heuristic,
                f"{sum(proved)} / {drawn}",
                f"{mean('mean_gap'):.3%}",
                f"{largest:.1%}",
                f"{mean('optimal_share'):.0%}",
            )
        )
    return "\n".join([*lines, "", _source(list(newest.values()), "exact_gaps"), ""])


BLOCKS = {
    "documents that wait": waiting_table,
    "times of HBSA": hbsa_table,
    "ideas that pay": ideas_table,
    "gaps to exact solutions": gaps_table,
}


def page_with_tables() -> str:
    """The page with the blocks replaced."""
    text = PAGE.read_text(encoding="utf-8")
    for name, block in BLOCKS.items():
        begin, end = f"<!-- {name}: make docs -->\n", f"<!-- end of {name} -->\n"
        before, rest = text.split(begin)
        text = before + begin + block() + end + rest.split(end)[1]
    return text


def _newest(file: str) -> Rows:
    """Rows of the last run, told by its commit."""
    with (RESULTS / file).open(newline="") as rows:
        held = list(csv.DictReader(rows))
    last = (held[-1]["date"], held[-1]["commit"])
    return [row for row in held if (row["date"], row["commit"]) == last]


def _source(rows: Rows, benchmark: str) -> str:
    commits = ", ".join(f"`{commit}`" for commit in dict.fromkeys(row["commit"] for row in rows))
    path = f"benchmarks/{benchmark}.py"
    return f"[`python {path} --append`](../{path}), commit {commits}."


def _cells(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    PAGE.write_text(page_with_tables(), encoding="utf-8")
