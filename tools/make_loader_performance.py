"""docs/loader_performance.md: what the loader costs, from the newest rows of benchmarks/results/loader.csv.

python tools/make_loader_performance.py      writes the file; tests/docs compares it with the committed one
"""

import csv
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROWS = ROOT / "benchmarks" / "results" / "loader.csv"
TARGET = ROOT / "docs" / "loader_performance.md"
README = ROOT / "README.md"
BEGIN, END = "<!-- packed against padded: make docs -->\n", "<!-- end of packed against padded -->\n"
LINK = "docs/loader_performance.md#effective-tokens-a-second-of-training"

HEAD = """\
# What the loader costs

Made by `python tools/make_loader_performance.py` from the rows in
[`benchmarks/results/loader.csv`](../benchmarks/results/loader.csv); do not edit. Figures are medians over repeats that
take turns; "spread" is the largest over the smallest. Ratios are formed inside one run. Absolute times are those of
the machine named above each table; its load (of the benchmark itself, and of what ran before it) tells how far to
trust them.
"""

PACKED = """\
## Short documents into packs, with their tokens

    python benchmarks/loader_rates.py --part packed [--quick] [--append]

Documents of 50 to 200 tokens from a tokenised memmap to packs of 8,192 tokens ready to train, on one rank, `best_fit`.
The peers get the same documents from the same memmap. grain and TRL stream, as the loader does; axolotl's packer knows
all lengths beforehand. None of them agrees on one global batch with other ranks, checks a plan or keeps an exact state
and a ledger, which is in the loader's time. "PackedLoader, with its start" is a whole run from the constructor to the
last pack, its worker process and 60,000 documents included, so its rate rises with longer runs.
"""
STAGES = """\
Where the time goes, microseconds a document of the rank's thread ("batch": blocks of the streams joined to a global
batch; "share": the plan as bytes and back; blocks themselves are read and encoded by the worker, at about 2 µs a
document):
"""
PLANNED = """\
## Lengths only

    python benchmarks/loader_rates.py --part planned [--quick] [--append]

Lognormal lengths, DP 8, packs of 32K tokens. "packing" is the packing call alone, the others are
`StepPlanner.propose`: everything up to the sealed plan. Time per document hardly changes with the batch.
"""
RANKS = """\
## With more documents and more ranks

    python benchmarks/loader_ranks.py [--quick] [--append]

Processor time of a rank's thread per document of the *global* batch of 4,096, waiting not counted, over gloo. With n
documents a step and R ranks, every rank does O(n) small work (draws, lengths, plan decoded and checked), which is
nearly all there is; rank 0 also plans in O(n log n); reading, encoding and collating fall as n / R. So a global batch
of 100,000 short documents costs every rank about half a second a step in the background, however many ranks there are.
On the wire are 8 bytes a document from its reader to all (lengths and label counts), the plan from rank 0 to all, and
4 bytes a token (8 with labels of its own) from its reader to each rank that trains it.
"""
TEXT = """\
## Text, tokenised while it is read

    python benchmarks/loader_rates.py --part text [--quick] [--append]

jsonl of Python sources cut into texts of 100 to 20,000 characters, byte-pair tokeniser of 8,192 entries, whose own
threads use all cores in every row: on two cores workers add only their start (0.2 s each, inside the times). What the
loader adds to the tokeniser is the reading, decoding, shuffling and joining.
"""
START = """\
## Start to first batch

    python benchmarks/loader_start.py --part start [--quick] [--append]

From making the loader to its first batch of 64 documents (bytes tokens), each in a new process; "with imports" counts
from the start of the process. A worker process costs its own start once.
"""
MEMORY = """\
## Memory of a long stream

    python benchmarks/loader_start.py --part memory [--quick] [--append]

Resident memory of the process and its workers, sampled 50 times a second, pages of files not counted. It must not grow
with the file: not against a file of a twentieth, and not from the first to the second half.
"""
RESUME = """\
## Resume

    python benchmarks/loader_start.py --part resume [--quick] [--append]

From `load_state` to the next batch, which must be the one that followed when the state was made. "replay" is what it
costs to read everything again up to there.
"""
TRAINING = """\
## Effective tokens a second of training

    python benchmarks/loader_training.py [--quick] [--append]

A tiny Llama on the CPU, forward and backward; real tokens, padding not counted. Lengths of `github_dirs` divided by 32
(2,048 tokens stand for a context of 64K), the same documents, weights, loss and gradient norm in every row (checked).
On the CPU transformers computes packed rows under a block-diagonal mask, whole squares; rows "per document" call sdpa
once a document instead, as attention with cumulative lengths does on a GPU. Then TRL's packs and ours, both nearly
full, cost the same in one process: what a global plan adds shows with several ranks and stages, which this table has
not.
"""
OVERLAP = """\
## Waiting for data

    python benchmarks/loader_overlap.py [--quick] [--append]

`evenload train` in two processes (pp = 2, `slimpack`): time that a step waits for its data over its own time, steps
after the first, the longest wait of all ranks.
"""

Row = dict[str, str]


def performance_page() -> str:
    """The whole page."""
    rows = _newest()
    lines = [
        HEAD,
        *_section(PACKED, rows["packed"], _packed),
        *_section(PLANNED, rows["planned"], _rates),
        *_section(RANKS, rows["ranks"], _wide),
        *_section(TEXT, rows["text"], _wide),
        *_section(START, rows["start"], _wide),
        *_section(MEMORY, rows["memory"], _wide),
        *_section(RESUME, rows["resume"], _wide),
        *_section(TRAINING, rows["training"], _training),
        *_section(OVERLAP, rows["overlap demo"] + rows["overlap skewed"], _wide),
    ]
    return "\n".join(lines).rstrip("\n") + "\n"


def readme_with_ratios() -> str:
    """The README with its sentence on packed training, TRL's beside ours."""
    before, rest = README.read_text(encoding="utf-8").split(BEGIN)
    return before + BEGIN + _packed_against_padded(_newest()["training"]) + END + rest.split(END)[1]


def _packed_against_padded(rows: list[Row]) -> str:
    ratio = {
        row["case"].rsplit(", ", 1)[0]: float(row["value"])
        for row in rows
        if (row["unit"], row["baseline"]) == ("x", "padded")
    }
    ours, ours_alone = (ratio[f"PackedLoader best_fit{how}"] for how in ("", ", per document"))
    trl, trl_alone = (ratio[f"trl bfd{how}"] for how in ("", ", per document"))
    return (
        "On the most skewed lengths, in one process on a CPU, packed training does\n"
        f"[{ours:.1f} times the tokens of padded training]({LINK}),\n"
        f"and {ours_alone:.1f} times where attention runs document by document, as kernels with cumulative lengths "
        "do.\n"
        f"TRL's packing does {trl:.1f} and {trl_alone:.1f} times in the same table; what a plan for all ranks adds "
        "shows with several of them.\n"
    )


def _newest() -> dict[str, list[Row]]:
    """Per benchmark the rows of its last run: those of the last row's date and commit, of two equal ones the later."""
    found: dict[str, list[Row]] = {name: [] for name in (
        "packed", "planned", "ranks", "text", "start", "memory", "resume", "training",
        "overlap demo", "overlap skewed",
    )}  # fmt: skip
    if ROWS.is_file():
        with ROWS.open(newline="") as file:
            for row in csv.DictReader(file):
                found[row["benchmark"]].append(row)
    for name, rows in found.items():
        last = [row for row in rows if (row["date"], row["commit"]) == (rows[-1]["date"], rows[-1]["commit"])]
        found[name] = list({(row["case"], row["metric"], row["baseline"]): row for row in last}.values())
    return found


def _section(text: str, rows: list[Row], table) -> Iterable[str]:
    yield text
    if not rows:
        yield "*To be measured.*\n"
        return
    row = rows[-1]
    load = f"load {row['load']} in the minute before"
    yield f"{row['date']}, commit `{row['commit']}`, {row['cores']} cores of {row['cpu']}, {load}.\n"
    yield from table(rows)
    yield ""


def _packed(rows: list[Row]) -> Iterable[str]:
    named = {(row["case"], row["metric"]): row for row in rows}
    cases = list(dict.fromkeys(row["case"] for row in rows))
    yield from _head(("packer", "documents a second", "spread", "fill", "loader's rate over it"))
    over = {row["baseline"]: row for row in rows if row["metric"].startswith("rate, ")}
    for case in cases:
        rate, fill = named[case, "documents per second"], named[case, "fill"]
        ratio = f"{float(over[case]['value']):.1f}×" if case in over else ""
        yield _line(case, f"{float(rate['value']):,.0f}", rate["spread"], f"{float(fill['value']):.1%}", ratio)
    ours = next((row["case"] for row in over.values()), "")
    yield f"\nThe last column compares with {ours.replace('1 workers', '1 worker')}.\n"
    yield STAGES
    stages = list(dict.fromkeys(row["metric"] for row in rows if row["metric"].startswith("time: ")))
    yield from _head(("", *(stage.removeprefix("time: ") for stage in stages)))
    for case in cases:
        if (case, stages[0]) in named:
            yield _line(case, *(f"{float(named[case, stage]['value']):.2f}" for stage in stages))


def _rates(rows: list[Row]) -> Iterable[str]:
    rates = {tuple(row["case"].split(", ", 1)): row for row in rows if row["unit"] == "1/s"}
    counts = list(dict.fromkeys(count for _, count in rates))
    yield from _head(("lengths a second", *counts))
    for name in dict.fromkeys(name for name, _ in rates):
        found = (rates.get((name, count)) for count in counts)
        yield _line(name, *(f"{float(row['value']) / 1e6:.2f} M" if row else "" for row in found))


def _wide(rows: list[Row]) -> Iterable[str]:
    """One line a case, one column a metric."""
    metrics = list(dict.fromkeys((row["metric"], row["unit"], row["baseline"]) for row in rows))
    named = {(row["case"], row["metric"], row["baseline"]): row for row in rows}
    heads = (
        f"{metric}, {unit}" + (f" of {base}" if unit == "share" else f" {base}" if base else "")
        for metric, unit, base in metrics
    )
    yield from _head(("", *heads))
    for case in dict.fromkeys(row["case"] for row in rows):
        found = ((named.get((case, metric, base)), unit) for metric, unit, base in metrics)
        shown = case.replace("1 workers", "1 worker").replace("1 ranks", "1 rank")
        yield _line(shown, *(_value(row, unit) if row else "" for row, unit in found))


def _training(rows: list[Row]) -> Iterable[str]:
    found = {row["baseline"] for row in rows if row["unit"] == "x"}
    bases = [base for base in ("padded", "trl bfd", "trl bfd, per document") if base in found]
    yield from _head(("variant", "tokens a second", "spread", "real of computed", *(f"× {base}" for base in bases)))
    for case in dict.fromkeys(row["case"] for row in rows):
        mine = [row for row in rows if row["case"] == case]
        rate = next(row for row in mine if row["unit"] == "1/s")
        share = next(row for row in mine if row["unit"] == "share")
        ratios = {row["baseline"]: f"{float(row['value']):.2f}" for row in mine if row["unit"] == "x"}
        name = case.rsplit(", ", 1)[0]
        yield _line(
            name, f"{float(rate['value']):,.0f}", rate["spread"], f"{float(share['value']):.0%}",
            *(ratios.get(base, "") for base in bases),
        )  # fmt: skip
    yield f"\n{rows[0]['case'].rsplit(', ', 1)[1]}."


def _value(row: Row, unit: str) -> str:
    value = float(row["value"])
    return f"{value:.2%}" if unit == "share" else f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _head(heads: Iterable[str]) -> Iterable[str]:
    heads = list(heads)
    yield _line(*heads)
    yield "|" + "---|" * len(heads)


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    TARGET.write_text(performance_page(), encoding="utf-8")
    README.write_text(readme_with_ratios(), encoding="utf-8")
