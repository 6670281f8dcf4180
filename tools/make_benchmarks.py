"""docs/benchmarks.md: how to run the benchmarks, and their current tables, made from the rows in benchmarks/results.

python tools/make_benchmarks.py             writes the file; tests/docs compares it with the committed one
"""

import csv
import runpy
from collections.abc import Iterable
from pathlib import Path
from statistics import geometric_mean, median

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
TARGET = ROOT / "docs" / "benchmarks.md"
SHOWN_CASES = (
    ("lognormal 32K", "512"),
    ("lognormal 32K", "2048"),
    ("github_dirs 32K", "512"),
    ("github_dirs 128K", "512"),
)
BUSY_LOAD = 2.0
BASELINES = ("best_fit, any layout", "best_fit, pp >= 4", "best_fit, median layout", "its Megatron-LM")
FLEXPIPE_BASES = (
    *("static padded", "static best_fit", "static flexpipe"),
    *("published", "known 1", "documents only", "best fixed"),
)

TEXTS = runpy.run_path(str(ROOT / "tools" / "benchmark_texts.py"))
"""What stands before each table."""

Table = list[dict[str, str]]


def benchmarks_page() -> str:
    """The whole page."""
    return (
        "\n".join(
            [
                *(TEXTS["PLANNERS"], *_peers(), TEXTS["PIPELINE"], *_planners("planners.csv"), TEXTS["NO_PIPELINE"]),
                *(
                    *_planners("planners_pp1.csv"),
                    TEXTS["GROWTH"],
                    *_growth(),
                    TEXTS["ABLATION"],
                    *_ablation(),
                    TEXTS["SLIMPACK"],
                    *_slimpack(),
                ),
                *(
                    TEXTS["WLB"],
                    *_wlb(),
                    TEXTS["DELAY"],
                    *_delay(),
                    TEXTS["SKRULL"],
                    *_skrull(),
                    TEXTS["FLEXPIPE"],
                    *_flexpipe(),
                ),
                *(TEXTS["SWITCH"], *_switches()),
            ]
        ).rstrip("\n")
        + "\n"
    )


def _peers() -> Iterable[str]:
    """From benchmarks/peers.py, which imports no peer by itself."""
    names: dict[str, list[str]] = {}
    for peer in runpy.run_path(str(ROOT / "benchmarks" / "peers.py"))["PEERS"]:
        names.setdefault(peer.micro_batches, []).append(peer.name)
    yield from _head(("micro-batches of a replica", "peers"))
    for rule, of_rule in names.items():
        yield _line(rule, ", ".join(of_rule))
    yield ""


def _planners(file: str) -> Iterable[str]:
    rows = _latest(file, ("case", "documents"))
    if (picture := (RESULTS / file).with_suffix(".png")).is_file():
        yield f"![Simulated share of the lower bound](../benchmarks/results/{picture.name})\n"
    yield from _provenance(rows)
    yield f"{_over_best_peers(rows)}\n"
    heads = ("planner", "plan ms", "packs", "fill", "left", "over", "fwd", "bwd", "DP", "of bound", "GiB", "in 80 GB")
    for case, documents in SHOWN_CASES:
        mine = [row for row in rows if (row["case"], row["documents"]) == (case, documents)]
        if not mine:
            continue
        yield f"#### {case}, {documents} documents, packs of {int(mine[0]['capacity']):,} tokens\n"
        yield from _head(heads)
        for row in mine:
            name = f"{row['planner']} {'' if row['planner'].startswith('evenload') else row['version']}".strip()
            if not row["step_s"]:
                yield f"| {name} | {row['note']} |" + " |" * (len(heads) - 2)
                continue
            within = _percent(row["within_fraction"]) if row["within_fraction"] else "does not fit"
            yield _line(
                name, f"{float(row['plan_ms']):.3g}", row["packs"], _percent(row["fill"]), row["dropped"],
                row["over_cap"], f"{float(row['pack_forward']):.3f}", f"{float(row['pack_backward']):.3f}",
                f"{float(row['dp']):.4f}", _percent(row["fraction"]), f"{float(row['peak_gib']):.0f}", within,
            )  # fmt: skip
        yield ""
    yield f"The other tables of `examples/lengths`, at both contexts, are in `benchmarks/results/{file}`.\n"


def _over_best_peers(rows: Table) -> str:
    """What the best peer of every case takes over `auto`, in all of them."""
    sentences = []
    for column, memory in (("step_s", "Memory ignored"), ("within_s", "Within 80 GB")):
        ratios, refused = [], 0
        for case in dict.fromkeys((row["case"], row["documents"]) for row in rows):
            mine = [row for row in rows if (row["case"], row["documents"]) == case]
            (ours,) = (float(row[column]) for row in mine if row["planner"] == "evenload auto")
            peers = [float(row[column]) for row in mine if _is_peer(row) and row[column]]
            ratios += [min(peers) / ours] if peers else []
            refused += not peers
        sentences.append(
            f"{memory}, the fastest peer of a case takes {min(ratios):.2f} to {max(ratios):.2f} times as long as "
            f"`auto`, {median(ratios):.2f} in the median of {len(ratios)} cases"
            + (f"; in {refused} more no peer's packs fit." if refused else ".")
        )
    return " ".join(sentences)


def _is_peer(row: dict[str, str]) -> bool:
    return not row["planner"].startswith("evenload")


def _growth() -> Iterable[str]:
    rows = [row for row in _latest("planning_growth.csv", ("benchmark",)) if row["metric"] == "plan and choose"]
    yield from _provenance(rows)
    # "slimpack, 512 documents, dp=8 pp=4"
    times = {tuple(row["case"].split(" documents")[0].split(", ")): float(row["value"]) for row in rows}
    strategies = list(dict.fromkeys(name for name, _ in times))
    yield from _head(("documents", *strategies))
    for count in dict.fromkeys(count for _, count in times):
        yield _line(count, *(f"{times[name, count]:.3g}" if (name, count) in times else "" for name in strategies))
    yield ""


def _slimpack() -> Iterable[str]:
    rows = _latest("paper_slimpack.csv", ("case",))
    yield from _provenance(rows)
    baselines = ("x best_fit", "x pp >= 4", "x median", "paper")
    yield from _head(("model, context, lengths", "strategy", "layout", "of bound", *baselines, "lost to"))
    for case in dict.fromkeys(row["case"] for row in rows):
        mine = [row for row in rows if row["case"] == case]
        shares = {
            row["metric"].removeprefix("share: "): float(row["value"])
            for row in mine
            if row["metric"].startswith("share")
        }
        lost = sorted(((share, cause) for cause, share in shares.items() if cause != "useful work"), reverse=True)
        speed = {row["baseline"]: row for row in mine if row["metric"].startswith("speed-up")}
        bound = next(row for row in mine if row["metric"] == "of bound")
        # "llama-7b on 128 H100, 64K, github_dirs, slimpack, simulated"
        model, context, lengths, strategy, _ = case.split(", ")
        older = " \\*" * (bound["commit"] != rows[-1]["commit"])
        yield _line(
            f"{model}, {context}, {lengths}{older}", strategy, bound["baseline"], _percent(bound["value"]),
            *(_times(speed.get(baseline)) for baseline in BASELINES),
            ", ".join(f"{cause} {share:.1%}" for share, cause in lost[:4]),
        )  # fmt: skip
    yield ""


def _wlb() -> Iterable[str]:
    everything = _latest("paper_wlb.csv", ("benchmark",))
    rows, causes = ([row for row in everything if (row["benchmark"] == "wlb") == own] for own in (True, False))
    yield from _provenance(rows)
    yield from _wlb_means(rows)
    yield from _head(("one change, 8 steps", "strategy", "x Plain-4D under the same change, geometric mean"))
    for row in causes:
        cause, strategy, _ = row["case"].split(", ")
        yield _line(cause, strategy, f"{float(row['value']):.3f}")
    yield ""
    yield from _head(("setting", "strategy", "x Plain-4D", "of bound", "imbalance", "mean delay of a token, steps"))
    for case in dict.fromkeys(row["case"] for row in rows):
        figures = {row["metric"]: float(row["value"]) for row in rows if row["case"] == case}
        setting, layout, strategy, _ = case.split(", ")
        yield _line(
            f"{setting}, {layout}", strategy, f"{figures['speed-up']:.2f}", f"{figures['of bound']:.1%}",
            f"{figures['imbalance forward']:.3f}", f"{figures['mean token delay']:.2f}",
        )  # fmt: skip
    yield ""


def _wlb_means(rows: Table) -> Iterable[str]:
    """Geometric means over the settings of each context, as the paper's Fig. 12 has them."""
    found: dict[str, dict[str, list[float]]] = {}
    for row in (row for row in rows if row["metric"] == "speed-up"):
        setting, _, strategy, _ = row["case"].split(", ")
        found.setdefault(strategy, {}).setdefault(setting.split()[1], []).append(float(row["value"]))
    yield from _head(("x Plain-4D, geometric mean", "64K", "128K", "all"))
    for strategy, by_context in found.items():
        every = [value for values in by_context.values() for value in values]
        cells = (by_context.get("64K", []), by_context.get("128K", []), every)
        yield _line(strategy, *(f"{geometric_mean(values):.3f}" if values else "" for values in cells))
    yield ""


def _skrull() -> Iterable[str]:
    rows = _latest("paper_skrull.csv", ("benchmark",))
    yield from _provenance(rows)
    yield from _head(("setting", "layout", "strategy", "of bound", "x one a pass", "x best_fit"))
    for case in dict.fromkeys(row["case"] for row in rows):
        mine = [row for row in rows if row["case"] == case]
        speed = {row["baseline"]: row for row in mine if row["metric"] == "speed-up"}
        setting, layout, strategy, _ = case.split(", ")
        yield _line(
            setting,
            layout,
            strategy,
            _percent(mine[0]["value"]),
            _times(speed.get("one a pass")),
            _times(speed.get("best_fit")),
        )
    yield ""


def _flexpipe() -> Iterable[str]:
    # Cells are simulated; times of the search are measured, and not always anew with them.
    rows = _latest("paper_flexpipe.csv", ("case",))
    searches = [row for row in rows if "," not in row["case"]]
    yield from _provenance([row for row in rows if "," in row["case"]])
    yield from _head(("model", "longest document", "documents", *(f"x {base}" for base in FLEXPIPE_BASES), "switches"))
    by_case = {
        case: [row for row in rows if row["case"] == case] for case in dict.fromkeys(row["case"] for row in rows)
    }
    for case, mine in by_case.items():
        # "bert-340m, 1 nodes, longest 2048, 4 documents, simulated"; the searches' cases have no commas.
        if "," not in case:
            continue
        model, nodes, longest, documents, _ = case.split(", ")
        speed = {row["baseline"]: row for row in mine if row["metric"] == "speed-up"}
        switches = next(row["value"] for row in mine if row["metric"] == "switches")
        yield _line(
            f"{model}, {nodes.replace('1 nodes', '1 node')}",
            f"{int(longest.split()[1]):,}",
            documents.split()[0],
            *(_times(speed.get(base)) for base in FLEXPIPE_BASES),
            switches,
        )
    yield ""
    yield from _provenance(searches)
    yield from _head(
        ("HBSA on one batch of 256 documents", "ms", "mappings priced", "splits of layers", "exhaustive ms")
    )
    for case, mine in by_case.items():
        if "," in case:
            continue
        figures = {row["metric"]: f"{float(row['value']):,.0f}" for row in mine}
        metrics = ("HBSA", "mappings priced", "splits of layers in all", "exhaustive")
        yield _line(case, *(figures.get(metric, "") for metric in metrics))
    yield ""


def _switches() -> Iterable[str]:
    rows = [row for row in _latest("results.csv", ("benchmark", "case")) if row["benchmark"] == "reconfigure"]
    yield from _provenance(rows)
    figures = {(row["case"].split(", ")[-1], row["metric"], row["baseline"]): row["value"] for row in rows}
    columns = {
        "over stop and transfer": ("stall", "stop and transfer"),
        "with waiting": ("stall and wait", "stop and transfer"),
        "over save, restart, load": ("stall", "save, restart, load"),
        "over predicted": ("stall, measured", "predicted"),
        "over corrected": ("stall, measured", "corrected"),
    }
    yield from _head(("change", *columns))
    for change in dict.fromkeys(change for change, _, _ in figures):
        yield _line(change, *(f"{float(figures[change, *column]):.2g}" for column in columns.values()))
    yield ""


def _delay() -> Iterable[str]:
    rows = _latest("wlb_delay.csv", ("benchmark",))
    yield from _provenance(rows)
    yield from _head(("lengths", "N", "`balance`: imbalance", "delay", "`queues`: imbalance", "delay"))
    # "docs, N=32, release balance"
    figures = {(row["case"], row["metric"]): float(row["value"]) for row in rows}
    for cell in dict.fromkeys(row["case"].partition(", release ")[0] for row in rows):
        name, _, count = cell.partition(", N=")
        cases = [f"{cell}, release {rule}" for rule in ("balance", "queues")]
        metrics = (("imbalance", ".3f"), ("mean token delay", ".2f"))
        yield _line(name, count, *(format(figures[case, name], form) for case in cases for name, form in metrics))
    yield ""


def _ablation() -> Iterable[str]:
    rows = _latest("ablation.csv", ("benchmark",))
    yield from _provenance(rows)
    cases = list(dict.fromkeys(row["case"] for row in rows))
    figures = {(row["metric"], row["case"]): float(row["value"]) for row in rows}
    # "llama-13b, dp=4 cp=2 pp=4 tp=4, 256K, 1024 documents, 3 batches, simulated"
    heads = [", ".join(case.split(", ")[:3]) for case in cases]
    yield from _head(("change", *heads))
    metrics = list(dict.fromkeys(row["metric"] for row in rows))
    for metric in (one for one in metrics if not one.startswith("noise") and not one.endswith(": beyond memory")):
        cells = []
        for case in cases:
            excess = figures.get((f"{metric}: beyond memory", case))
            share = f"{figures[metric, case]:.1%}" if (metric, case) in figures else ""
            cells.append(f"{share} (+{excess:.0f} GiB)" if excess else share)
        yield _line(metric, *cells)
    yield ""
    yield "Time lost when durations differ from the estimate by log-normal noise of so much:\n"
    yield from _head(("noise", *heads))
    for metric in (one for one in metrics if one.startswith("noise")):
        losses = (figures.get((metric, case)) for case in cases)
        yield _line(metric.removeprefix("noise "), *("" if loss is None else f"{loss:+.1%}" for loss in losses))
    yield ""


def _latest(name: str, keys: tuple[str, ...]) -> Table:
    """Rows of the last run of each case: those that share date and commit with the case's last row."""
    path = RESULTS / name
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    last = {tuple(row[key] for key in keys): (row["date"], row["commit"]) for row in rows}
    newest = [row for row in rows if last[tuple(row[key] for key in keys)] == (row["date"], row["commit"])]
    # Of two runs at one commit the later.
    names = [name for name in ("case", "documents", "planner", "metric", "baseline") if name in rows[0]]
    return list({tuple(row[name] for name in names): row for row in newest}.values())


def _provenance(rows: Table) -> Iterable[str]:
    if not rows:
        yield "*To be measured.*\n"
        return
    row = rows[-1]
    load = f", load {row['load']} (other jobs ran: times are too high)" if float(row.get("load", 0)) > BUSY_LOAD else ""
    older = dict.fromkeys((other["date"], other["commit"]) for other in rows if other["commit"] != row["commit"])
    also = "".join(f"; older rows (\\*) {date}, commit `{commit}`" for date, commit in older)
    yield f"{row['date']}, commit `{row['commit']}`, {row['cores']} cores of {row['cpu']}{load}{also}.\n"


def _head(heads: Iterable[str]) -> Iterable[str]:
    heads = list(heads)
    yield _line(*heads)
    yield "|" + "---|" * len(heads)


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _percent(value: str) -> str:
    return f"{float(value):.1%}"


def _times(row: dict[str, str] | None) -> str:
    return f"{float(row['value']):.2f}" if row else ""


if __name__ == "__main__":
    TARGET.write_text(benchmarks_page(), encoding="utf-8")
