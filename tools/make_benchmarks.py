"""docs/benchmarks.md: how to run the benchmarks, and their current tables, made from the rows in benchmarks/results.

python tools/make_benchmarks.py             writes the file; tests/docs compares it with the committed one
"""

import csv
import runpy
from collections.abc import Iterable
from pathlib import Path
from statistics import geometric_mean

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

PLANNERS = """\
# Benchmarks of the planners

Made by `python tools/make_benchmarks.py` from the rows in `benchmarks/results`; do not edit. The loader's are in
[loader_performance.md](loader_performance.md).

Planning times are measured on the machine named with each table. **Step times are simulated**, with Evenload's
analytic cost model of H100, for every planner alike; no GPU was used. Compare them with each other, not with a clock.

## Beside other planners

    pip install 'evenload[bench]' && pip install --no-deps -r benchmarks/peers.txt
    python benchmarks/planners.py [--quick] [--append] [--picture] [--layout pp4|pp1]

One global batch, one process, one cost model, one simulator; llama-7b on 32 H100. Packs of whole documents run in 1F1B,
and packs of planners without an own data-parallel assignment are dealt round robin in the planner's order. Every plan
is checked: each document once, each token once each way.

| column | meaning |
|---|---|
| plan ms | median of 3 after a warm-up; peers: the packing call alone; Evenload: all up to the sealed plan |
| packs, fill | forward packs of all replicas; tokens over packs x token limit |
| left, over | documents in no pack; packs above the token limit |
| fwd, bwd | max/mean pack time, worst replica; peers' figures are those of their packs as they are |
| DP | max/mean forward + backward time of replicas |
| of bound | lower bound (all useful work, spread evenly over all devices) over simulated step time, memory ignored |
| GiB | peak memory when all activations are stored |
| in 80 GB | of bound again, within 75 GB: activations stored, recomputed or offloaded, the fastest way that fits |

How many micro-batches a replica gets under a peer is what its users get:
"""
PIPELINE = """\
### DP 8 x PP 4
"""
NO_PIPELINE = """\
### DP 8 x TP 4, no pipeline

Without a pipeline micro-batches run one after the other and never wait for each other: their number and their evenness
inside a replica do not matter, and a peer's usual number is as good as any. What is left to a planner is the evenness
of replicas, the constant of a micro-batch, and memory.
"""
GROWTH = """\
## Planning time over batch size

    python benchmarks/planning_growth.py [--quick] [--append] [--picture]

Milliseconds to plan and choose, the sealed plan included; lognormal lengths, DP 8 x PP 4, packs of at most 32K tokens,
80 GB devices. The dashes in the picture are our targets: 20 ms for 512 documents, 100 ms for 2,048.

![Planning time over documents](../benchmarks/results/planning_growth.png)
"""
SLIMPACK = """\
## SlimPack's settings

    python benchmarks/paper_slimpack.py [--quick] [--append] [--documents 1024]

**Simulated.** Each strategy at its own best layout of tp x cp x pp x dp x virtual stages within 80 GB. Speed-ups are
over `best_fit` tuned over all layouts, tuned over those with at least 4 pipeline stages, and at the median of all
layouts that fit. The paper compares with a Megatron-LM whose layouts it does not publish. The last column says what
most of the rest of the lower bound is lost to. `slimpack` and `auto` share documents among replicas (DP-Merge), `auto`
also splits backwards.
"""
WLB = """\
## WLB-LLM's settings

    python benchmarks/paper_wlb.py [--quick] [--append]

**Simulated.** The layouts of its Table 1, batches of PP x DP windows, 32 steps. Plain-4D is the loader's windows as
they come, each shared per sequence by the context ranks; Fixed-4D packs a global batch anew, per sequence or per
document throughout, whichever is faster; "adaptive" and both `wlb` choose the sharding for every micro-batch. The paper
measured 1.03 for Fixed-4D and 1.23 for WLB-LLM (64K: 1.15, 128K: 1.30; Fig. 12), and 1.05 of the sharding alone at 7B
and 128K.
"""

SKRULL = """\
## Skrull's settings

    python benchmarks/paper_skrull.py [--quick] [--append]

**Simulated.** Its models, data sets (from the shares of its Table 1), layouts and batch sizes on 32 devices, 8 steps.
The paper reports means of 5.50 (0.5B) and 2.03 (7B) over DeepSpeed. "one a pass" runs every document alone, sharded
over all context ranks; a baseline that packs leaves less to gain.
"""
FLEXPIPE = """\
## FlexPipe's settings

    python benchmarks/paper_flexpipe.py [--quick] [--append]

**Simulated.** Models and clusters of its Table 1, 24 steps. Time of each way to train over the time of `flexpipe`;
"best fixed" is the fastest single layout in hindsight.
[planner.md](planner.md#flexpipe-another-layout-between-steps) says why switching gains nothing over it. "documents
only" has no layers that recompute (the paper's O_plan).
"""
SWITCH = """\
## A change of the layout

    python benchmarks/reconfigure.py [--quick] [--append]

**Measured.** Four CPU processes train a Llama of 94 M parameters in fp32 and change between three layouts (like
FlexPipe's Fig. 10). How long training stands still, over what two other ways take, in one run: the same moves without
shared memory, nothing prepared and waiting for all of them (stop and transfer), and a checkpoint that new processes
load; and over what was predicted. Medians of rounds by turns. "With waiting": and what the optimizer still waits for
behind the first step.
[Decision 31](decisions/0031-live-switching.md) says how.
"""
DELAY = """\
## Documents that wait

    python benchmarks/wlb_delay.py [LENGTHS ...] [--quick] [--append]

Imbalance of N micro-batches (longest over mean, forward + backward) and mean delay of a token in steps, llama-7b at
128K, 40 steps, mean of 3 seeds: `wlb` with its two release rules.
"""
ABLATION = """\
## Which ideas pay

    python benchmarks/ablation.py [--quick] [--append]

**Simulated**, 80 GB, 3 batches of 1,024 documents. Share of the lower bound, one change at a time to the base:
symmetric cuts under the list schedule, without a pipeline whole documents, policies and sharing chosen by search.
"(+4 GiB)": does not fit, by so much in the worst batch. [planner.md](planner.md#which-ideas-pay) draws the conclusions.
"""

Table = list[dict[str, str]]


def benchmarks_page() -> str:
    """The whole page."""
    return (
        "\n".join(
            [
                *(PLANNERS, *_peers(), PIPELINE, *_planners("planners.csv"), NO_PIPELINE),
                *(*_planners("planners_pp1.csv"), GROWTH, *_growth(), ABLATION, *_ablation(), SLIMPACK, *_slimpack()),
                *(WLB, *_wlb(), DELAY, *_delay(), SKRULL, *_skrull(), FLEXPIPE, *_flexpipe()),
                *(SWITCH, *_switches()),
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
        yield _line(
            f"{model}, {context}, {lengths}", strategy, bound["baseline"], _percent(bound["value"]),
            *(_times(speed.get(baseline)) for baseline in BASELINES),
            ", ".join(f"{cause} {share:.1%}" for share, cause in lost[:4]),
        )  # fmt: skip
    yield ""


def _wlb() -> Iterable[str]:
    rows = _latest("paper_wlb.csv", ("benchmark",))
    yield from _provenance(rows)
    yield from _wlb_means(rows)
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
    yield f"{row['date']}, commit `{row['commit']}`, {row['cores']} cores of {row['cpu']}{load}.\n"


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
