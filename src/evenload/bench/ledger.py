"""The ledger of a comparison: one row a strategy and batch, appended to a CSV file that only grows.

Whoever reads it can tell cases apart: what was run (plan digest, strategy, layout, model), on what (device, threads,
versions, costs), when, and the signed errors of step time, pack times and memory. Rows of other columns are refused, so
that a file never holds two formats.
"""

import csv
import io
from datetime import UTC, datetime
from pathlib import Path

from evenload.bench.runs import BatchRun, BenchResult
from evenload.errors import ConfigError

KEYS = ("model", "parameters", "layout", "device", "costs", "versions")
"""Facts of a result that every row repeats."""
COLUMNS = (
    *("date", *KEYS),
    *("strategy", "batch", "plan_digest", "documents", "tokens", "forward_packs", "rounds"),
    *("step_time_s", "predicted_step_time_s", "step_time_error"),
    *("pack_time_error_median", "pack_time_error_median_abs", "pack_time_error_p90_abs"),
    *("peak_memory_bytes", "predicted_peak_memory_bytes", "memory_error"),
)


def append_result(path: Path, result: BenchResult) -> int:
    """Append a result's rows; returns how many.

    Raises:
        ConfigError: the file exists and is no ledger with these columns, or cannot be written.
    """
    require_ledger(path)
    facts, date = dict(result.facts), datetime.now(UTC).strftime("%Y-%m-%d %H:%M")
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    is_new = not path.exists() or not path.stat().st_size
    if is_new:
        writer.writerow(COLUMNS)
    rows = [(one.strategy, run) for one in result.runs for run in one.batches]
    for strategy, run in rows:
        writer.writerow((date, *(facts[key] for key in KEYS), strategy, *_cells(run)))
    try:
        with path.open("a", newline="") as file:
            file.write(text.getvalue())
    except OSError as error:
        raise ConfigError(f"cannot write the ledger {path}: {error.strerror or error}") from error
    return len(rows)


def require_ledger(path: Path) -> None:
    """Check that rows can be appended, before the work.

    Raises:
        ConfigError: the file holds something else.
    """
    if not path.is_file() or not path.stat().st_size:
        return
    with path.open(newline="", errors="replace") as file:
        found = next(csv.reader(file), [])
    if tuple(found) != COLUMNS:
        raise ConfigError(
            f"--ledger {path} is no ledger of this version: its first line has {len(found)} columns, not the "
            f"{len(COLUMNS)} that start with {', '.join(COLUMNS[:3])}; choose another file"
        )


def _cells(run: BatchRun) -> tuple[object, ...]:
    errors = run.packs
    return (
        *(run.batch, run.plan_digest, run.documents, run.tokens, run.num_packs, len(run.measured_s)),
        *(f"{run.step_time_s:.6f}", f"{run.predicted_s:.6f}", f"{run.error:+.4f}"),
        *(f"{errors.median:+.4f}", f"{errors.median_abs:.4f}", f"{errors.p90_abs:.4f}"),
        *(run.measured_peak_bytes, run.predicted_peak_bytes, f"{run.memory_error:+.4f}"),
    )
