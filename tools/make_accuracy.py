"""docs/accuracy.md, its picture, and the intervals that the package carries, from the rows in benchmarks/accuracy.

    python tools/make_accuracy.py       after `make accuracy`, and in `make docs`; a test compares all three

Figures are of current rows (a case that was measured again supersedes its earlier rows, which stay in the files) and
are as they were recorded: no prediction is made here.
"""

from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from statistics import mean, median

import msgspec
import numpy as np

from evenload.bench.results import QUIET_SPREAD, QUIET_WAITED_SHARE
from evenload.explore.prediction_interval import DATA_SHEET_ERROR, MEASURED_ERROR
from evenload.planning.strategies.registry import strategy_named
from ledger import LedgerRow, current_rows, read_ledger
from ledger_accuracy import (
    APART,
    MEDIAN_LIMIT,
    RANKING_LIMIT,
    Again,
    coverage,
    held_to_limits,
    intervals_of,
    kind_of,
    ranked,
)

ROOT = Path(__file__).resolve().parent.parent
LEDGERS = tuple(ROOT / "benchmarks" / "accuracy" / name for name in ("cpu.csv", "gpu.csv"))
PAGE = ROOT / "docs" / "accuracy.md"
PICTURE = ROOT / "docs" / "pictures" / "accuracy.svg"
INTERVALS = ROOT / "src" / "evenload" / "explore" / "prediction_errors.json"
WORST = 10
# Of the picture: pixels, and the largest error that is drawn at its place.
WIDTH, LEFT, ROW, TOP, SHOWN = 900, 130, 46, 58, 0.3

HEAD = """\
# How far predictions are off

Made by `python tools/make_accuracy.py` from the rows in `benchmarks/accuracy`; do not edit.

    make accuracy                                        # all cases on this machine, 45 minutes, wants a quiet one
    python benchmarks/measured.py --case pp2-dirs-small  # one of them; --list names them

Every row is one global batch trained by real processes under one strategy, beside what was predicted for the same plan
before it ran. Strategies of a case train the same batches, interleaved step by step (`evenload bench`). Errors are
signed: predicted / measured - 1, so a minus promised too much.

Rows are only ever added; where a case was measured again, its newest rows count. Costs, lengths, model, layout and
options of every row lie beside the file, and a test makes each prediction again: it fails where an error moves by more
than a percentage point without the case being measured again.
"""


def main() -> None:
    """All three."""
    PAGE.write_text(page(), encoding="utf-8")
    PICTURE.write_text(picture(held()), encoding="utf-8")
    INTERVALS.write_bytes(intervals())


def intervals() -> bytes:
    """The file in the package, one line for each interval."""
    lines = ",\n".join(f"  {msgspec.json.encode(one).decode()}" for one in intervals_of(held()))
    return f"[\n{lines}\n]\n".encode() if lines else b"[]\n"


def all_rows() -> list[LedgerRow]:
    """Of all ledgers, oldest first."""
    return [row for ledger in LEDGERS for row in read_ledger(ledger)]


def held() -> list[LedgerRow]:
    """Current rows that limits hold for."""
    return [row for row in current_rows(tuple(all_rows())) if held_to_limits(row)]


def page() -> str:
    """The whole page."""
    rows, kept = all_rows(), held()
    current = current_rows(tuple(rows))
    parts = [HEAD]
    if kept:
        parts += [_summary(kept), "![Signed errors of step times](pictures/accuracy.svg)\n"]
        parts += ["## By kind of case\n", _by_kind(kept), "## The worst, and why\n", _worst(kept)]
    else:
        parts.append("**No rows of a quiet machine yet.**\n")
    others = [row for row in current if not held_to_limits(row)]
    if others:
        parts += [_DISTURBED, _table_of(others)]
    parts += ["## Intervals of printed predictions\n", _intervals(kept)]
    parts.append(_provenance(rows, current))
    return "\n".join(parts)


_DISTURBED = f"""\
## Not held to the limits

Cases with more computing threads than cores, whose ranks take cores from each other, which the simulator's devices do
not; and rows measured beside other work (a rank stood without a core for more than {QUIET_WAITED_SHARE:.0%} of the
time, or rounds differ by more than {QUIET_SPREAD:.0%}).
"""


def _summary(rows: Sequence[LedgerRow]) -> str:
    errors = [row.step_time_error for row in rows]
    ranking = ranked(Again(row, None) for row in rows)
    inside, total = coverage(rows)
    lines = [
        "| of a quiet machine with a core for every thread | here | limit |",
        "|---|---|---|",
        f"| rows, cases | {len(rows)}, {len({(row.case, row.layout) for row in rows})} | |",
        f"| step time: median of absolute errors | {_median_abs(errors)} | {MEDIAN_LIMIT:.0%} |",
        f"| step time: 90th percentile of absolute errors, largest error, mean error | {_p90_abs(errors)}, "
        f"{max(errors, key=abs):+.1%}, {mean(errors):+.1%} | |",
        f"| pack time: median and 90th percentile of absolute errors, mean over rows | "
        f"{mean(row.pack_time_error_median_abs for row in rows):.1%}, "
        f"{mean(row.pack_time_error_p90_abs for row in rows):.1%} | |",
        f"| the same pack in one round against its median over the rounds: 90th percentile, mean over rows | "
        f"{mean(row.pack_repeat_p90 for row in rows):.1%} | |",
        f"| memory: largest error | {max((row.memory_error for row in rows), key=abs):+.1%} | |",
        f"| pairs of strategies that differ by more than {APART:.0%}, in the right order | "
        f"{ranking.right} of {ranking.pairs} | {RANKING_LIMIT:.0%} |",
        f"| rows inside the 90 % interval made from all other cases | {inside} of {total} | 85-95 % |",
    ]
    return "\n".join([*lines, ""])


def _by_kind(rows: Sequence[LedgerRow]) -> str:
    lines = [
        "| costs | layout | strategies | rows | bias | median | 90th percentile | packs, median | memory, largest |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    key = lambda row: (row.costs, kind_of(row), _family(row.strategy))  # noqa: E731
    for kind, result in groupby(sorted(rows, key=key), key):
        mine = list(result)
        errors = [row.step_time_error for row in mine]
        lines.append(
            f"| {' | '.join(kind)} | {len(mine)} | {mean(errors):+.1%} | {_median_abs(errors)} | {_p90_abs(errors)} | "
            f"{mean(row.pack_time_error_median_abs for row in mine):.1%} | "
            f"{max((row.memory_error for row in mine), key=abs):+.1%} |"
        )
    return "\n".join([*lines, ""])


def _worst(rows: Sequence[LedgerRow]) -> str:
    return _table_of(sorted(rows, key=lambda row: -abs(row.step_time_error))[:WORST])


def _table_of(rows: Iterable[LedgerRow]) -> str:
    lines = [
        "| case | layout | strategy, batch | measured | step error | packs, total | where it comes from |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.case} | {row.layout} | {row.strategy}, {row.batch} | {row.step_time_s:.3g} s | "
        f"{row.step_time_error:+.1%} | {row.pack_time_error_total:+.1%} | {_why(row)} |"
        for row in rows
    ]
    return "\n".join([*lines, ""])


def _why(row: LedgerRow) -> str:
    """What the row itself tells: noise, packs, or what lies between them."""
    if row.demand > 1:
        return f"{row.demand:g} computing threads a core: ranks wait for each other's cores"
    if not row.is_quiet:
        return f"busy machine: {row.waited_share:.0%} of the time without a core, rounds differ by {row.spread:.0%}"
    if row.step_time_error * row.pack_time_error_total > 0 and abs(row.pack_time_error_total) > abs(
        row.step_time_error / 2
    ):
        return "packs: their seconds are off by as much"
    return "between packs: waiting, transfers, reduction, optimizer"


def _intervals(rows: Sequence[LedgerRow]) -> str:
    lines = [
        "Every step time that Evenload prints carries the interval in which nine of ten measured ones lie. It comes",
        "from the rows above where they speak for the kind of case and the model of processor: CV+ with a fold a case",
        "(`tools/ledger_accuracy.py`), so that a case is never judged by itself. Elsewhere it is the largest error",
        "that comparable simulators published, either way, and says so. These rows are of quiet machines. An",
        "interval of costs that a disturbed calibration measured is wider by what its repeats differed by and its",
        "processes waited for a core; where that is more than 50 % or 15 % there is none, and the line says that the",
        "machine was busy; nor where `train.calibration_max_s` cut it short (`explore/prediction_interval.py`).\n",
        "| costs | layout | measured / predicted | from |",
        "|---|---|---|---|",
    ]
    for one in intervals_of(rows):
        lines.append(
            f"| measured, on {one.device} | {one.layout} | {one.low:.2f}-{one.high:.2f} | "
            f"{one.rows} rows of {one.cases} cases |"
        )
    for costs, error, source in (
        ("measured, no rows of the kind", MEASURED_ERROR, "SimuMax v1.2, the largest of its 43 signed rows"),
        ("data sheet", DATA_SHEET_ERROR, "dPRO, the largest error that Lumos (MLSys'25) reports of it"),
    ):
        lines.append(f"| {costs} | any | {1 / (1 + error):.2f}-{1 / (1 - error):.2f} | {error:.1%}: {source} |")
    return "\n".join([*lines, ""])


def _provenance(rows: Sequence[LedgerRow], current: Sequence[LedgerRow]) -> str:
    if not rows:
        return ""
    machines = sorted({f"{row.device}, {row.versions}, commit `{row.commit}`, {row.date[:10]}" for row in current})
    superseded = f" {len(rows) - len(current)} superseded rows stay in the files." if len(rows) > len(current) else ""
    return f"Measured on {'; '.join(machines)}.{superseded}\n"


def picture(rows: Sequence[LedgerRow]) -> str:
    """The SVG: a dot a row by its signed error, a line of dots a kind of layout and family of strategies."""
    key = lambda row: (kind_of(row), _family(row.strategy))  # noqa: E731
    groups = [(kind, list(result)) for kind, result in groupby(sorted(rows, key=key), key)]
    height = TOP + ROW * max(1, len(groups)) + 34
    parts = [
        f'<rect class="within" x="{_x(-MEDIAN_LIMIT)}" y="{TOP - 6}" width="{_x(MEDIAN_LIMIT) - _x(-MEDIAN_LIMIT)}" '
        f'height="{height - TOP - 22}"/>'
    ]
    for tick in range(-3, 4):
        x, label = _x(tick / 10), f"{tick * 10:+d}" if tick else "0"
        parts.append(
            f'<line class="{"zero" if tick == 0 else "grid"}" x1="{x}" y1="{TOP - 6}" x2="{x}" y2="{height - 28}"/>'
        )
        parts.append(f'<text class="tick" x="{x}" y="{height - 12}">{label} %</text>')
    for index, (kind, mine) in enumerate(groups):
        y = TOP + ROW * index + ROW // 2
        parts.append(f'<text class="name" x="12" y="{y - 3}">{escape(kind[0])}</text>')
        parts.append(f'<text class="what" x="12" y="{y + 12}">{escape(kind[1])}</text>')
        for place, row in enumerate(sorted(mine, key=lambda row: row.step_time_error)):
            # Neighbours stand on three lines, so that equal errors do not hide each other.
            parts.append(f'<circle cx="{_x(row.step_time_error)}" cy="{y + 8 * (place % 3 - 1)}" r="3.5"/>')
        middle = _x(median(row.step_time_error for row in mine))
        parts.append(f'<line class="median" x1="{middle}" y1="{y - 16}" x2="{middle}" y2="{y + 16}"/>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="system-ui, sans-serif">\n'
        "<style>circle{fill:#2f6fbd;fill-opacity:.55}.within{fill:#eef1ea}.grid{stroke:#d5d9dd}.zero{stroke:#4c5661}"
        ".median{stroke:#c2571a;stroke-width:2}.name{font-size:14px;font-weight:600;fill:#1c232b}"
        ".what,.tick{font-size:12px;fill:#4c5661}.tick{text-anchor:middle}</style>\n"
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>\n'
        '<text class="name" x="12" y="20">Signed errors of predicted step times</text>\n'
        f'<text class="what" x="12" y="38">predicted / measured - 1, a dot a row; green: within {MEDIAN_LIMIT:.0%}; '
        f"orange: the median; beyond {SHOWN:.0%} at the edge</text>\n" + "\n".join(parts) + "\n</svg>\n"
    )


def _x(error: float) -> float:
    share = (min(max(error, -SHOWN), SHOWN) + SHOWN) / (2 * SHOWN)
    return round(LEFT + 30 + share * (WIDTH - LEFT - 60), 1)


def _family(strategy: str) -> str:
    """What a strategy does to documents."""
    traits = strategy_named(strategy)
    if traits.assigns_ranks:
        return "by rank"
    return "slices" if traits.cuts_documents else "whole documents"


def _median_abs(errors: Iterable[float]) -> str:
    return f"{median(map(abs, errors)):.1%}"


def _p90_abs(errors: Sequence[float]) -> str:
    return f"{float(np.quantile(np.abs(errors), 0.9)):.1%}"


if __name__ == "__main__":
    main()
