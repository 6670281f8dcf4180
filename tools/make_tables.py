"""Tables and sentences of the pages that are made of rows of benchmarks, of the test matrix and of nothing else.

    python tools/make_tables.py      part of `make docs`; tests/docs compares what is committed

A block stands between `<!-- NAME: make docs -->` and `<!-- end of NAME -->`; `BLOCKS` says which function makes it for
which page. Rows are those of benchmarks/results/SCRIPT.csv; of rows that were measured again the newest count.
"""

import importlib
import math
import runpy
import statistics
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from paper_tables import (
    contexts,
    convergence,
    flexpipe,
    flexpipe_layouts,
    hbsa,
    skrull,
    skrull_sizes,
    skrull_steps,
    slimpack,
    slimpack_batches,
    solver,
    waiting,
    wlb,
)
from rows import ROOT, Rows, newest, percent, source, table, times

PAGE, ENGINES, TESTED, MICRO_BATCHES, README = (
    ROOT / name
    for name in ("docs/benchmarks.md", "docs/engines.md", "docs/tested.md", "docs/micro_batches.md", "README.md")
)
# Measured on this machine


def _range(script: str, benchmark: str, metric: str, form: str = "{:.2f}-{:.2f}×") -> str:
    values = newest(script, benchmark).values(metric)
    return form.format(values[0], values[-1])


def _speed_up(rows: Rows, start: str) -> str:
    own = Rows(row for row in rows if row["case"].startswith(start))
    return f"{own.value('speed-up, measured'):.2f}× ({own.value('speed-up, predicted'):.2f}×)"


def _simulator() -> str:
    rows = newest("simulator").some(case="simulate: 4,096 tasks, 8 stages, 256 packs each way")
    return f"{(rows.value('tasks per second') or 0) / 1e6:.0f} M, {rows.value('speed-up'):.0f}×"


def _context_ranks() -> str:
    dacp = Rows(row for row in newest("context_parallel") if row["case"].endswith("dacp") and "QA" not in row["case"])
    moved, took = dacp.values("bytes"), dacp.values("time")
    return f"{moved[0]:.2f}-{moved[-1]:.2f}×, {took[0]:.2f}-{took[-1]:.2f}×"


def _swinging() -> str:
    rows = newest("swinging")
    result = []
    for name in ("dp=2", "pp=2"):
        measured, predicted = (rows.value(f"speed-up over {name}, {how}") for how in ("measured", "predicted"))
        result.append(f"{name} {measured:.2f}× ({predicted:.2f}×)")
    return ", ".join(result)


def _overlap(kind: str, time: str) -> str:
    rows = Rows(row for row in newest("reduction") if "over a link of" in row["case"])
    hidden, predicted = rows.value(f"{kind} hidden"), rows.value(f"{kind} hidden, predicted")
    return f"{rows.value(f'time, {time}'):.2f}×; {hidden:.0%} ({predicted:.0%})"


def _step_over_prediction(script: str, start: str) -> str:
    rows = Rows(row for row in newest(script) if row["case"].startswith(start))
    return f"{rows.value('step time'):.2f}×"


MEASURED: Mapping[str, tuple[str, Callable[[], str], str]] = {
    "replay-time": (
        "replay", lambda: _range("replay", "replay", "time"),
        "replay: time of loss and gradients, against plain transformers and autograd",
    ),
    "recompute-time": (
        "replay", lambda: _range("replay", "recompute", "time"), "recompute: time, against the same",
    ),
    "replay-memory": (
        "replay", lambda: _range("replay", "replay", "peak memory"), "replay: peak memory, against the same",
    ),
    "simulator": (
        "simulator", _simulator, "simulator: tasks a second, and against its reference in plain Python",
    ),
    "demo": (
        "demo", lambda: _speed_up(newest("demo"), "slimpack"),
        "demo: step time of `best_fit` over `slimpack`, measured (predicted)",
    ),
    "demo-prediction": (
        "demo", lambda: _step_over_prediction("demo", "slimpack"), "demo: step time of `slimpack` over its prediction",
    ),
    "shared-outlier": (
        "dp_merge", lambda: _speed_up(newest("dp_merge"), "dp 2"),
        "one document of 20 times the mean, two replicas: step time apart over shared, measured (predicted)",
    ),
    "context-ranks": (
        "context_parallel", _context_ranks,
        "`skrull` on 4 context ranks, against sharing all documents: bytes moved, time; its two long-tailed tables",
    ),
    "swinging-phases": (
        "swinging", _swinging,
        "phases of short and of long documents: time in every layout over `flexpipe`'s, measured (predicted)",
    ),
    "reduce-scatter": (
        "reduction", lambda: _overlap("reduction", "sums"),
        "gradients summed during packs, over a link of 2 Gbit/s: step time against after them; hidden (predicted)",
    ),
    "all-gather": (
        "reduction", lambda: _overlap("gather", "both"), "the same and weights gathered; hidden (predicted) of these",
    ),
}  # fmt: skip
"""Anchor -> the script, the figure, what it is."""
IN_README = ("replay-time", "replay-memory", "demo", "shared-outlier")


def measured() -> str:
    """All figures with their commands."""
    lines = [
        (f'<a id="{name}"></a>{what}', figure(), f"[`{script}.py`](../benchmarks/{script}.py)")
        for name, (script, figure, what) in MEASURED.items()
    ]
    scripts = dict.fromkeys(script for script, _, _ in MEASURED.values())
    places = sorted({f"{row['cores']} cores of {row['cpu']}" for script in scripts for row in newest(script)})
    return table(("what", "figure", "benchmark"), lines) + f"\nMeasured on {', '.join(places)}.\n"


def measured_in_readme() -> str:
    """The README's lines, each figure a link to its row."""
    lines = ((MEASURED[name][2], f"[{MEASURED[name][1]()}](docs/benchmarks.md#{name})") for name in IN_README)
    return table(("measured, on 2 cores", "figure"), lines)


def switches() -> str:
    """How long training stands still at a change of the layout."""
    rows = newest("reconfigure")
    columns = {
        "over stop and transfer": ("stall", "stop and transfer"),
        "with waiting": ("stall and wait", "stop and transfer"),
        "over save, restart, load": ("stall", "save, restart, load"),
        "over a step": ("stall", "one step"),
        "step with a change over one without": ("step", "one step"),
        "over predicted": ("stall, measured", "predicted"),
        "over corrected": ("stall, measured", "corrected"),
    }
    lines = (
        (case.split(", ")[-1], *(f"{own.value(*column):.2g}" for column in columns.values()))
        for case, own in rows.by_case().items()
    )
    return table(("change", *columns), lines) + source(rows, "reconfigure")


def recurrent() -> str:
    """Time and memory of recurrent layers in slices."""
    rows = newest("recurrent")
    found: dict[str, list[str]] = {}
    for case, own in rows.by_case().items():
        family = case.split(", ")[0]
        cell = f"{own.value('time'):.2f}×, {own.value('peak memory'):.2f}×"
        found.setdefault(family, []).append(cell)
    header = ("family", "whole", "4 slices", "16 slices")
    return table(header, ((family, *cells) for family, cells in found.items())) + source(rows, "recurrent")


def trees() -> str:
    """What sharing prefixes saves in whole runs."""
    rows = newest("trees", "trees")
    lines = (
        (case.removeprefix("run, "), *(f"{own.value(metric):.2f}×" for metric in ("step time", "peak memory")))
        for case, own in rows.by_case().items()
        if case.startswith("run, ")
    )
    return table(("sequences", "step time", "memory, of predicted"), lines) + source(rows, "trees")


# Planners


def peer_rules() -> str:
    """How many micro-batches users of a peer get."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    rules: dict[str, list[str]] = {}
    for peer in importlib.import_module("peers").PEERS:
        rules.setdefault(peer.micro_batches, []).append(peer.name)
    return table(("micro-batches of a replica", "peers"), ((rule, ", ".join(names)) for rule, names in rules.items()))


def planners(title: str) -> str:
    """One setting: shares of the bound of every planner in some cases, and our lead over the best peer in all."""
    shown = ("lognormal 32K, 512", "github_dirs 32K, 512", "github_dirs 128K, 512")
    rows = newest("planners")
    result: dict[str, dict[str, Rows]] = {}
    for case, own in rows.by_case().items():
        setting, lengths, _ = case.split(", ", 2)
        documents, planner = case.split(", ")[2].split()[0], case.rpartition(", ")[2]
        if setting == title:
            result.setdefault(f"{lengths}, {documents}", {})[planner] = own
    heads = ["planner"]
    heads += [f"{name[:-5]}: {metric}" for name in shown for metric in ("plan ms", "of bound", "in 80 GB")]
    lines = []
    for planner in result[shown[0]]:
        cells = []
        for name in shown:
            own = result[name].get(planner, Rows())
            within = own.value("in 80 GB")
            cells += [times(own.value("plan"), 1), percent(own.value("of bound"))]
            cells.append("does not fit" if within == 0 else percent(within))
        lines.append((planner, *cells))
    return _over_best_peers(result) + "\n" + table(heads, lines) + source(rows, "planners")


def _over_best_peers(result: Mapping[str, Mapping[str, Rows]]) -> str:
    sentences = []
    for metric, words in (("of bound", "Memory ignored"), ("in 80 GB", "Within 80 GB")):
        ratios, refused = [], 0
        for own in result.values():
            ours = own["evenload auto"].value(metric) or 0.0
            best = max(rows.value(metric) or 0.0 for name, rows in own.items() if not name.startswith("evenload"))
            ratios += [ours / best] if best else []
            refused += not best
        sentences.append(
            f"{words}, the fastest peer of a case takes {min(ratios):.2f} to {max(ratios):.2f} times as long as "
            f"`auto`, {statistics.median(ratios):.2f} in the median of {len(ratios)} cases"
            + (f"; in {refused} more no peer's packs fit." if refused else ".")
        )
    return "\n".join(sentences) + "\n"


def planning_times() -> str:
    """Milliseconds over documents and over tables of lengths."""
    # The baseline's milliseconds stand in their column, so that rows of a case differ in it from day to day.
    rows = Rows({(row["case"], row["metric"]): row for row in newest("planning", "planning")}.values())
    cells: dict[tuple[int, str], dict[str, list[float]]] = {}
    for row in rows.some(metric="plan and choose"):
        name, count, lengths, limit = row["case"].split(", ")
        kind = lengths if lengths.startswith("lognormal") else "four tables, 32K and 128K"
        key = int(count.split()[0].replace(",", "")), f"{kind}, {limit}"
        cells.setdefault(key, {}).setdefault(name, []).append(float(row["value"]))
    names = ("best_fit", "balanced", "wlb", "skrull", "slimpack", "auto")

    def span(values: list[float]) -> str:
        return "-".join(f"{value:,.0f}" for value in dict.fromkeys((min(values), max(values)))) if values else ""

    lines = (
        (f"{count:,}", what, *(span(own.get(name, [])) for name in names))
        for (count, what), own in sorted(cells.items())
    )
    prices = newest("planning", "price").values("price over processor time")
    said = (
        f"The price by which `auto` ends its search (`planning_share`) is {min(prices):.2f} to {max(prices):.2f} times "
        "the processor time of planning, in the median of batches of one size.\n"
    )
    timed = table(("documents", "lengths, memory", *(f"`{name}`" for name in names)), lines)
    return timed + said + source(rows, "planning")


def ideas() -> str:
    """Every change to the base: percentage points of the lower bound, or per cent lost to wrong durations."""
    rows = newest("ablation")
    cases = rows.by_case()

    def cell(metric: str, own: Rows) -> str:
        value, base = own.value(metric), own.value("base")
        if value is None or base is None:
            return "-"
        if metric == "base":
            return f"{value:.1%}"
        if own.value(f"{metric}: beyond memory"):
            return "over memory"
        return f"loses {value:.1%}" if metric.startswith("noise") else f"{100 * (value - base):+.1f}"

    metrics = dict.fromkeys(row["metric"] for row in rows if not row["metric"].endswith(": beyond memory"))
    metrics = sorted(metrics, key=lambda metric: metric.startswith("noise"))
    heads = [f"{case.split(', ')[0]}, {case.split(', ')[2]}: {case.split(', ')[1]}" for case in cases]
    lines = ((metric, *(cell(metric, own) for own in cases.values())) for metric in metrics)
    return table(("change to the base", *heads), lines) + source(rows, "ablation")


GROUP_FIGURES = ("mean", "most", "least")


def gaps() -> str:
    """Heuristics against optima, over all tables of lengths and numbers of documents."""
    rows = newest("exact_gaps")
    result: dict[tuple[str, str], list[Rows]] = {}
    for case, own in rows.by_case().items():
        problem, heuristic, _ = case.split("; ")
        result.setdefault((problem, heuristic), []).append(own)
    lines = []
    for key, cells in result.items():
        proved = [int(own.value("proved") or 0) for own in cells]
        drawn = sum(int(own.value("instances") or 0) for own in cells)
        solved = [(own, count) for own, count in zip(cells, proved, strict=True) if count]
        means = (
            sum((own.value(metric) or 0.0) * count for own, count in solved) / sum(proved)
            for metric in ("mean gap", "share optimal")
        )
        mean, optimal = means
        largest = max(own.value("largest gap") or 0.0 for own, _ in solved)
        lines.append((*key, f"{sum(proved)} / {drawn}", f"{mean:.3%}", f"{largest:.1%}", f"{optimal:.0%}"))
    heads = ("problem", "heuristic", "proved / drawn", "mean gap", "largest gap", "share optimal")
    return table(heads, lines) + source(rows, "exact_gaps")


def group_sizes() -> str:
    """Groups of any size that share documents, by number of replicas."""
    rows = newest("group_sizes")
    lines = [
        (case.split(",")[0].removeprefix("dp "), *(f"{own.value(f'speed-up, {name}'):.2f}×" for name in GROUP_FIGURES))
        for case, own in rows.by_case().items()
    ]
    return table(("replicas", *GROUP_FIGURES), lines) + source(rows, "group_sizes")


# The loader


def packers() -> str:
    """Documents a second into packs, ours and peers'."""
    rows = newest("loader", "packed")
    lines = [
        (
            case,
            f"{own.value('documents per second'):,.0f}",
            percent(own.value("fill")),
            times(own.value("rate of ours"), 1),
        )
        for case, own in rows.by_case().items()
    ]
    return table(("packer", "documents a second", "fill", "loader's rate over it"), lines) + source(rows, "loader")


def _training() -> dict[str, Rows]:
    return {case.rpartition(", ")[0]: own for case, own in newest("loader_training").by_case().items()}


def training_rates() -> str:
    """Real tokens a second of training, packed in several ways."""
    bases = ("padded", "trl bfd", "trl bfd, per document")
    lines = [
        (name, f"{own.value('effective tokens per second', ''):,.0f}", f"{own.value('real tokens'):.0%}",
         *(times(own.value("effective tokens per second", base)) for base in bases))
        for name, own in _training().items()
    ]  # fmt: skip
    heads = ("variant", "tokens a second", "real of computed", *(f"× {base}" for base in bases))
    return table(heads, lines) + source(newest("loader_training"), "loader_training")


def packed_in_readme() -> str:
    """Sentences of the README: packed against padded training, with TRL's packing."""
    result = _training()

    def over(name: str) -> str:
        return f"{result[name].value('effective tokens per second', 'padded'):.1f}"

    return (
        "On the most skewed lengths, in one process on a CPU, packed training does\n"
        f"[{over('PackedLoader best_fit')} times the tokens of padded training]"
        "(docs/benchmarks.md#effective-tokens-a-second-of-training),\n"
        f"and {over('PackedLoader best_fit, per document')} times where attention runs document by document, as "
        "kernels with cumulative lengths do.\n"
        f"TRL's packing does {over('trl bfd')} and {over('trl bfd, per document')} times in the same table; what a "
        "plan for all ranks adds shows with several of them.\n"
    )


def gpu() -> str:
    """Runs on one GPU beside each other."""
    rows = newest("gpu_training")
    compared, peers = Rows(row for row in rows if row["unit"] == "x" and row["baseline"] == "padded"), "trl#6092"
    own = Rows(row for row in rows if row["case"].endswith(peers))
    names = [row["metric"].removesuffix(": rate") for row in own if row["metric"].endswith(": rate")]
    rates = {name: own.value(f"{name}: rate") or 0 for name in names}
    lines = [
        (f"{name}, {own[0]['case'].split(', ')[1]}" if name == "evenload" else name, f"{rates[name]:,.0f}",
         times(rates[name] / rates["packed with Liger"]), percent(own.value(f"{name}: MFU of the data sheet")),
         f"{own.value(f'{name}: peak memory'):.1f}", f"{own.value(f'{name}: loss'):.3f}")
        for name in sorted(names, key=lambda name: -rates[name])
    ]  # fmt: skip
    heads = ("loop", "tokens a second", "× packed with Liger", "MFU of the data sheet", "peak memory, GiB", "loss")
    off = " and ".join(
        f"{own.value(f'evenload: {key}', 'predicted'):.3f}" for key in ("step_time_s", "peak_memory_bytes")
    )
    rated = ", ".join(f"`{row['metric'].removesuffix(': rate')}` {float(row['value']):.2f}" for row in compared)
    commits = ", ".join(f"`{commit}`" for commit in dict.fromkeys(row["commit"] for row in rows))
    return (
        table(heads, lines) + f"\nStep time and peak memory of `evenload` over their predictions: {off}. "
        f"{compared[0]['case'].split(', ')[1]} with a heavy\ntail, rates over `padded`: {rated}.\n"
        f"\n`make gpu`, [`benchmarks/gpu_training.py`](../benchmarks/gpu_training.py): commits {commits}, "
        f"{own[0]['case'].split(', ')[0]}, torch {own[0]['torch']}.\n"
    )


# Engines and the matrix


def engine_steps() -> str:
    """Steps measured on the engines."""
    columns = {
        "auto faster": "`auto` over it, measured", "auto faster, lower quartile": "lower quartile",
        "auto faster, upper quartile": "upper quartile", "auto predicted faster": "predicted",
        "auto predicted over measured": "step of `auto`, predicted over measured",
    }  # fmt: skip
    rows = newest("engine_steps")
    lines = [
        (f"`{case.split(',')[0]}`", f"`{own.some(metric='auto faster')[-1]['baseline']}`",
         *(f"{own.value(metric):.3f}×" for metric in columns))
        for case, own in rows.by_case().items()
    ]  # fmt: skip
    return table(("engine", "what its users get", *columns.values()), lines) + source(rows, "engine_steps")


def engine_prices() -> str:
    """What engines are predicted to cost over Evenload's runtime: a row an engine, two columns a table of lengths."""
    rows = newest("engine_prices")
    result: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        engine, lengths, _, layout = row["case"].split(", ")[:4]
        cell = f"{float(row['value']):.3f}×"
        result.setdefault((f"`{engine}`", layout), {})[f"{lengths}: `{row['metric']}`"] = cell
    columns = list(dict.fromkeys(column for own in result.values() for column in own))
    lines = ((*key, *(own.get(column, "") for column in columns)) for key, own in result.items())
    return table(("engine", "layout", *columns), lines) + source(rows, "engine_prices")


def micro_batches() -> str:
    """Divisions of everybody, a column a shape."""
    rows = newest("micro_batches", "micro_batches")
    found: dict[str, dict[str, Rows]] = {}
    for case, own in rows.by_case().items():
        shape, name = case.split(" documents, ", 1)
        found.setdefault(name, {})[shape] = own
    shapes = list(found["evenload"])
    lines = []
    for name, of_shape in found.items():
        line = [name]
        for shape in shapes:
            own = of_shape.get(shape, Rows())
            mean, worst = own.value("step over bound"), own.value("step over bound, worst")
            line.append(f"{times(mean, 3)} ({times(worst)})" if mean else "")
        for metric in ("instances ahead of evenload", "micro-batches above the limit"):
            line.append(", ".join(f"{own.value(metric) or 0:.0f}" for own in of_shape.values()))
        took = [own.value("time") for own in of_shape.values()]
        line.append(", ".join(f"{one:,.0f}" if one >= 10 else f"{one:.1f}" for one in took if one is not None))
        lines.append(line)
    heads = ("division", *shapes, "ahead", "over the limit", "median ms")
    return table(heads, lines) + source(rows, "micro_batches")


def micro_batch_rules() -> str:
    """What rules cost."""
    rows = newest("micro_batches", "micro_batch_rules")
    lines = ((row["case"], f"{float(row['value']):.3f}×", row["baseline"]) for row in rows)
    return table(("16 ranks unless said", "step", "over"), lines) + source(rows, "micro_batches")


def micro_batches_measured() -> str:
    """Steps under FSDP2."""
    rows = newest("micro_batches", "fsdp2")
    lines = ((row["case"], row["baseline"], f"{float(row['value']):.2f}×") for row in rows)
    return table(("batches", "over the division of", "evenload faster"), lines) + source(rows, "micro_batches")


def matrix() -> str:
    """What is tested together and what is refused, from tests/support/matrix.py."""
    rules = runpy.run_path(str(ROOT / "tests" / "support" / "matrix.py"))
    axes = ((axis, rules["MEANINGS"][axis], "; ".join(values)) for axis, values in rules["AXES"].items())
    product = math.prod(len(values) for values in rules["AXES"].values())
    return (
        table(("axis", "what it is", "values"), axes)
        + f"\n{len(rules['matrix_rows']())} plans instead of {product:,} hold every pair of values but these:\n\n"
        + table(("refused at start", "because"), ((rule.pairs, rule.reason) for rule in rules["REFUSALS"]))
        + f"\nNot refused, but nothing to test: {'; '.join(rule.why for rule in rules['ABSENCES'])}.\n"
    )


BLOCKS: Mapping[Path, Mapping[str, Callable[[], str]]] = {
    PAGE: {
        "measured": measured, "switches": switches, "recurrent": recurrent, "trees": trees, "gpu": gpu,
        "peers": peer_rules,
        "planners with a pipeline": lambda: planners("DP 8 x PP 4"),
        "planners without": lambda: planners("DP 8 x TP 4"),
        "planning times": planning_times, "slimpack": slimpack, "slimpack's batches": slimpack_batches,
        "wlb": wlb, "documents that wait": waiting, "WLB contexts": contexts, "WLB solver": solver,
        "convergence": convergence,
        "skrull": skrull, "skrull's steps": skrull_steps, "skrull's sizes": skrull_sizes,
        "flexpipe": flexpipe, "FlexPipe layouts": flexpipe_layouts, "times of HBSA": hbsa, "ideas that pay": ideas,
        "gaps to exact solutions": gaps, "groups of any size": group_sizes,
        "packers": packers, "training": training_rates,
    },
    ENGINES: {
        "steps of engines": engine_steps, "prices of engines": engine_prices,
    },
    TESTED: {"matrix": matrix},
    MICRO_BATCHES: {
        "micro-batches": micro_batches, "rules of micro-batches": micro_batch_rules,
        "micro-batches under FSDP2": micro_batches_measured,
    },
    README: {"measured": measured_in_readme, "packed against padded": packed_in_readme},
}  # fmt: skip


def page_with_blocks(page: Path) -> str:
    """A page as it should be."""
    text = page.read_text(encoding="utf-8")
    for name, block in BLOCKS[page].items():
        begin, end = f"<!-- {name}: make docs -->\n", f"<!-- end of {name} -->\n"
        if text.count(begin) != 1 or text.count(end) != 1:
            sys.exit(f"tools/make_tables.py: {page.name} must have '{begin.strip()}' and '{end.strip()}' once each")
        before, rest = text.split(begin)
        text = before + begin + block() + end + rest.split(end)[1]
    return text


if __name__ == "__main__":
    for page in BLOCKS:
        page.write_text(page_with_blocks(page), encoding="utf-8")
