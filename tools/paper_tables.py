"""Tables of docs/benchmarks.md in the settings of SlimPack, WLB-LLM, Skrull and FlexPipe. The papers' own figures stand
here as they are printed, with the number of their table or figure."""

import itertools
import math
import re
import statistics

from rows import Rows, geometric, newest, percent, source, table, times


def _by_size(cell: tuple[str, str, str]) -> list[int]:
    return [int(re.findall(r"(\d+)[bK]", one)[0]) for one in cell[:2]]


def slimpack() -> str:
    """Shares of the bound, speed-ups and losses of SlimPack's settings."""
    rows = newest("paper_slimpack", "slimpack")
    cells: dict[tuple[str, str, str], dict[str, Rows]] = {}
    for case, own in rows.by_case().items():
        model, context, lengths, strategy, _ = case.split("; ")
        # Planned again, a cell may have another layout or lose time to other causes: rows that the old one had go.
        day = max(row["date"] for row in own)
        cells.setdefault((model, context, lengths), {})[strategy] = own.some(date=day)
    last, bases = (
        max(rows, key=lambda row: row["date"])["commit"],
        ("best_fit", "best_fit, pp >= 4", "best_fit, median layout"),
    )
    lines = []
    for model, context, lengths in sorted(cells, key=_by_size):
        own = cells[model, context, lengths]
        auto = own["auto"]
        (bound,) = auto.some(metric="of bound")
        shares = ((float(row["value"]), row["metric"][7:]) for row in auto if row["metric"].startswith("share: "))
        lost = sorted(((share, cause) for share, cause in shares if cause != "useful work"), reverse=True)
        older = " \\*" * (bound["commit"] != last)
        lines.append((
            model, f"{context}, {lengths}{older}", percent(own["best_fit"].value("of bound")),
            percent(own["slimpack"].value("of bound")), f"{percent(auto.value('of bound'))} ({bound['baseline']})",
            *(times(auto.value("speed-up", base)) for base in bases), times(auto.value("speed-up in the paper")),
            ", ".join(f"{cause} {share:.1%}" for share, cause in lost[:2]),
        ))  # fmt: skip
    fractions = [own["auto"].value("of bound") or 0.0 for own in cells.values()]
    reached = sum(fraction >= 0.92 for fraction in fractions)
    heads = ("model", "context, lengths", "`best_fit`", "`slimpack`", "`auto` (layout)", "× `best_fit`", "× pp ≥ 4")
    reported = (
        f"\n{reached} of {len(fractions)} cells of `auto` reach 92 %, the mean is {statistics.mean(fractions):.1%}, "
        f"the least {min(fractions):.1%}. Cells with \\* are from older commits.\n"
    )
    lines_and_heads = table((*heads, "× median layout", "the paper", "lost to"), lines)
    return lines_and_heads + reported + source(rows.some(commit=last), "paper_slimpack")


def slimpack_batches() -> str:
    """Shares of the bound and speed-ups of steps of more and more documents."""
    rows = newest("paper_slimpack", "slimpack batch")
    cells: dict[str, dict[str, Rows]] = {}
    for case, own in rows.by_case().items():
        _, _, _, documents, strategy, _ = case.split("; ")
        cells.setdefault(documents, {})[strategy] = own
    names = ("best_fit", "slimpack", "auto")
    lines = []
    for documents, own in cells.items():
        shares = (percent(own[name].value("of bound")) for name in names)
        lines.append((documents, *shares, times(own["auto"].value("speed-up", "best_fit"))))
    heads = ("a step", *(f"`{name}`" for name in names), "`auto` × `best_fit`")
    return table(heads, lines) + source(rows, "paper_slimpack")


def wlb() -> str:
    """Speed-ups over Plain-4D."""
    rows = newest("paper_wlb", "wlb")
    gains: dict[str, dict[str, list[float]]] = {}
    for row in rows.some(metric="speed-up"):
        setting, _, way, _ = row["case"].split(", ")
        gains.setdefault(way, {}).setdefault(setting.split()[1], []).append(float(row["value"]))
    means = [
        (
            way,
            *(geometric(own.get(context, [])) for context in ("64K", "128K")),
            geometric([*itertools.chain(*own.values())]),
        )
        for way, own in gains.items()
    ]
    return table(("× Plain-4D, geometric mean", "64K", "128K", "all"), means) + source(rows, "paper_wlb")


def waiting() -> str:
    """Imbalance and delay of both release rules of `wlb`."""
    rows = newest("paper_wlb", "wlb waiting")
    result: dict[tuple[str, str], list[str]] = {}
    for case, own in rows.by_case().items():
        name, _, rest = case.partition(", N=")
        cell = f"{own.value('imbalance'):.3f}, {own.value('mean token delay'):.2f}"
        result.setdefault((name, rest.split(",")[0]), []).append(cell)
    heads = ("lengths", "N", "`balance`: imbalance, delay", "`queues`: imbalance, delay")
    return table(heads, ((*key, *own) for key, own in result.items())) + source(rows, "paper_wlb")


WLB_CONTEXTS = {"128K": "1.33 (Fig. 13)", "160K": "1.40 (Fig. 14)"}
"""The paper's speed-ups at 7B that its text prints."""
# Imbalance and milliseconds of the paper's Table 2.
WLB_TABLE_2 = {
    "original packing": (1.44, 0), "greedy, global batches: 1": (1.41, 4), "greedy, global batches: 2": (1.22, 5),
    "greedy, global batches: 4": (1.11, 5), "solver, global batches: 1": (1.40, 467),
    "solver, global batches: 2": (1.18, 1488), "solver, global batches: 4": (1.09, 25_313),
    "WLB-LLM, queues: 1": (1.24, 8), "WLB-LLM, queues: 2": (1.05, 20), "WLB-LLM, queues: 3": (1.05, 23),
}  # fmt: skip


def contexts() -> str:
    """Speed-ups of WLB-LLM over contexts, beside the paper's."""
    rows = newest("paper_wlb", "wlb contexts")
    result: dict[str, dict[str, str]] = {}
    for row in rows:
        context, way, _ = row["case"].split(", ")
        result.setdefault(context, {})[way] = times(float(row["value"]))
    lines = ((context, *own.values(), WLB_CONTEXTS.get(context, "-")) for context, own in result.items())
    return table(("context", *result["160K"], "WLB-LLM, the paper"), lines) + source(rows, "paper_wlb")


def solver() -> str:
    """Imbalance and time of packings, beside the paper's."""
    rows = newest("paper_wlb", "wlb solver")
    lines = []
    for case, own in rows.by_case().items():
        stopped, (uneven, took_ms) = own.value("stopped at its limit"), WLB_TABLE_2[case]
        plan_ms = ", ".join(f"{own.value(f'plan, {how}'):,.0f}" for how in ("median", "mean"))
        cells = times(own.value("imbalance forward, simulated")), plan_ms, "" if stopped is None else f"{stopped:.0%}"
        lines.append((case, *cells, f"{uneven:.2f}, {took_ms:,} ms"))
    heads = ("packing", "imbalance, predicted", "plan, measured: median, mean ms", "stopped at 2 s", "the paper")
    return table(heads, lines) + source(rows, "paper_wlb")


# What the papers say of the loss, the delay and the imbalance under each order.
LOSS_IN_PAPERS = {
    "plain": "-; imbalance 1.44 (Table 2)", "wlb published": "as fixed 1 (Fig. 16); 0.5 steps, 1.05",
    "wlb balanced": "-", "fixed 8": "+1.6% over fixed 1 (Fig. 16)", "fixed 1": "the base; 1.41", "slimpack": "-",
    "skrull": "as plain (Skrull Fig. 5)",
}  # fmt: skip


def convergence() -> str:
    """Losses, delays and imbalance of every order of documents, mean and range of seeds; curves are in
    "convergence_curves"."""
    rows = newest("convergence")
    orders: dict[str, dict[str, Rows]] = {}
    for case, own in rows.some(benchmark="convergence").by_case().items():
        order, _, seed = case.partition(", seed ")
        orders.setdefault(order, {})[seed] = own
    # A benchmark that was stopped has not trained all orders of its last seed.
    common = set.intersection(*(set(own) for own in orders.values()))
    lines = []
    for order, of_seeds in orders.items():
        seeds = [of_seeds[seed] for seed in sorted(common)]
        over = [
            _change([own.value(metric, "plain") for own in seeds])
            for metric in ("held-out loss", "train loss, last fifth")
        ]
        loss, uneven = (
            statistics.mean(own.value(metric, base) or 0.0 for own in seeds)
            for metric, base in (("held-out loss", ""), ("imbalance, planned", None))
        )
        steps, tokens = (
            statistics.mean(own.value("mean token delay", base) or 0.0 for own in seeds)
            for base in ("", "tokens trained meanwhile")
        )
        spread = statistics.mean(own.value("tokens a step, standard deviation") or 0.0 for own in seeds)
        cells = f"{loss:.3f}", *over, f"{steps:.2f} ({tokens:,.0f})", f"{uneven:.2f}", f"{spread:.0%}"
        lines.append((order, *cells, LOSS_IN_PAPERS[order]))
    for case, own in rows.some(benchmark="convergence equal").by_case().items():
        order, apart = case.split(", ")[0], own.value("loss apart, largest") or 0.0
        same = f"losses of {case.rpartition(', ')[2]} equal plain's to {apart:.0e}"
        lines.append((case.rpartition(", ")[0], same, "", "", "0", "", "", LOSS_IN_PAPERS[order]))
    heads = (
        *("order", "held-out loss", "over plain", "training loss over plain"),
        *("delay of a token: steps (tokens)", "imbalance, planned", "tokens a step vary by", "the papers"),
    )
    seeds_used = (
        f"\nMean of {len(common)} seeds, smallest to largest in brackets.\n" if len(common) > 1 else "\nOne seed.\n"
    )
    return table(heads, lines) + seeds_used + source(rows, "convergence")


def _change(ratios: list[float | None]) -> str:
    known = [100 * (ratio - 1) for ratio in ratios if ratio is not None]
    if not known:
        return ""
    several = f" ({min(known):+.2f} to {max(known):+.2f})" if len(known) > 1 else ""
    return f"{statistics.mean(known):+.2f}%{several}"


def skrull() -> str:
    """Speed-ups over one document a pass, and over best fit."""
    rows = newest("paper_skrull", "skrull")
    lines = []
    for case, own in rows.by_case().items():
        setting, layout, strategy, _ = case.split(", ")
        speed = (times(own.value("speed-up", base)) for base in ("one a pass", "best_fit"))
        lines.append((setting, layout, strategy, percent(own.value("of bound")), *speed))
    return table(("setting", "layout", "strategy", "of bound", "× one a pass", "× best_fit"), lines) + source(
        rows, "paper_skrull"
    )


def skrull_steps() -> str:
    """Skrull's parts, alone and together: speed-ups over one document a pass."""
    rows = newest("paper_skrull", "skrull steps")
    cells: dict[str, dict[str, str]] = {}
    for case, own in rows.by_case().items():
        setting, way = case.removesuffix(", simulated").split(", ")
        for metric, column in (("speed-up", way), ("speed-up in the paper", "the paper")):
            if (value := own.value(metric)) is not None and setting != "both models":
                cells.setdefault(setting, {})[column] = times(value)
    ways = [way for way in dict.fromkeys(way for own in cells.values() for way in own) if way != "one a pass"]
    lines = ((setting, *(own.get(way, "") for way in ways)) for setting, own in sorted(cells.items()))
    ours, theirs = rows.some(case="both models, skrull, simulated"), rows.some(case="both models, skrull")
    over = [times(ours.value("mean speed-up", base)) for base in ("one a pass", "sorted")]
    paper = [times(theirs.value("speed-up in the paper", base)) for base in ("DeepSpeed", "sorted")]
    means = (
        f"\nMean of both models: {over[0]} over one a pass and {over[1]} over sorted; "
        f"the paper {paper[0]} over DeepSpeed and {paper[1]} over sorted.\n"
    )
    return table(("× one a pass", *ways), lines) + means + source(rows, "paper_skrull")


def skrull_sizes() -> str:
    """Over BatchSize and BucketSize, and with LoRA."""
    rows = Rows(row for row in newest("paper_skrull") if row["benchmark"] in ("skrull sizes", "skrull lora"))
    cells: dict[str, dict[str, str]] = {}
    for row in rows:
        setting, _, way = row["case"].removesuffix(", simulated").rpartition(", ")
        cells.setdefault(setting, {})["the paper" if "paper" in row["metric"] else way] = times(float(row["value"]))
    result = []
    for columns, empty in ((("as published", "skrull", "the paper"), ""), (("all weights", "LoRA"), "beyond memory")):
        own = {setting: found for setting, found in cells.items() if columns[1] in found}
        lines = ((setting, *(found.get(name, empty) for name in columns)) for setting, found in own.items())
        result.append(table(("× one a pass", *columns), lines))
    return "\n".join(result) + source(rows, "paper_skrull")


FLEXPIPE = {
    "static padded": ("`padded` in the static layout", "1.40 over Zero-Bubble, which pads"),
    "static best_fit": ("`best_fit` in the static layout", "1.23 over FlashAttention, which packs"),
    "static flexpipe": ("its own packing in the static layout", "-"),
    "published": ("`flexpipe` as published: least depth, no hysteresis, one step known", "-"),
    "known 1": ("itself with the coming step alone known", "-"),
    "documents only": ("itself without layers that recompute (O_plan)", "-"),
    "best fixed": ("its own packing in the best fixed layout", "-"),
}


def flexpipe() -> str:
    """Time of each way to train over `flexpipe`'s."""
    rows = newest("paper_flexpipe", "flexpipe")
    lines = []
    for base, (what, paper) in FLEXPIPE.items():
        ratios = rows.some(baseline=base).values("speed-up")
        mean = statistics.geometric_mean(ratios)
        lines.append((what, f"{mean:.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f}), {len(ratios)} cells", paper))
    return table(("against", "ratio", "the paper's figure"), lines) + source(rows, "paper_flexpipe")


def hbsa() -> str:
    """Time of FlexPipe's search, and of trying everything."""
    rows = newest("paper_flexpipe", "flexpipe search")
    lines = []
    for case, own in rows.by_case().items():
        exhaustive, gap = own.value("exhaustive"), own.value("gap")
        tried = "-" if exhaustive is None else f"{exhaustive / 1e3:.1f} s, gap {gap:.1%}"
        splits = own.value("splits of layers in all") or math.nan
        counts = f"{own.value('mappings priced'):.0f}", f"{splits:,.0f}" if splits < 1e6 else f"{splits:.1e}"
        lines.append((case, f"{own.value('HBSA'):.0f} ms", *counts, tried))
    heads = ("case", "HBSA", "mappings priced", "splits of layers there are", "all of them tried")
    return table(heads, lines) + source(rows, "paper_flexpipe")


def flexpipe_layouts() -> str:
    """FlexPipe's Table 2 beside what our search finds."""
    rows = newest("paper_flexpipe", "flexpipe table 2")
    result: dict[tuple[str, str, str], list[str]] = {}
    for case, own in rows.by_case().items():
        model, longest, devices, _ = case.split(", ", 3)
        step = own.some(metric="step in the paper's layout")[-1]
        peak_gb = own.value("peak memory in the paper's layout")
        cells = f"{float(step['value']):.2f} × `{step['baseline']}`", f"{peak_gb:.0f} GB"
        result.setdefault((model, longest.split()[1], f"({devices.replace('+', ', ')})"), []).extend(cells)
    heads = ("model", "longest", "the paper's layout", "4 documents", "memory", "64 documents", "memory")
    return table(heads, ((*key, *own) for key, own in result.items())) + source(rows, "paper_flexpipe")
