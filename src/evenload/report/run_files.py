"""Append to and read a run's files of JSON lines: `metrics.jsonl` (fixed keys), `validation.jsonl`, `layouts.jsonl` ...

A run killed in the middle of a write leaves a torn last line, which is left out with a log warning; anywhere else a
broken line is an error. Appending after a torn line is refused until `drop_torn_line` has cut it off. Non-finite
numbers of metrics are the strings "NaN", "Infinity" and "-Infinity".
"""

import json
import logging
import math
import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from evenload.errors import DataError
from evenload.types.run import LayoutDecision, Validation

METRIC_KEYS = (
    *("step", "loss", "grad_norm", "lr", "tokens", "label_tokens", "padding_tokens", "documents", "total_tokens"),
    *("total_label_tokens", "elapsed_s", "unix_time_s", "step_time_s", "exchange_s", "predicted_step_time_s"),
    *("reduction_s", "reduction_hidden_s", "predicted_reduction_s", "predicted_reduction_hidden_s"),
    *("gather_s", "gather_hidden_s", "predicted_gather_s", "predicted_gather_hidden_s", "tokens_per_s"),
    *("path_tokens_per_s", "tree_token_ratio", "recomputed_tokens", "mfu"),
    *("mfu_of_data_sheet", "bubble_fraction", "imbalance_forward", "imbalance_backward", "imbalance_dp"),
    *("pack_efficiency", "plan_time_s", "plan_cut_short", "data_wait_s", "peak_memory_bytes"),
    *("predicted_peak_memory_bytes", "deferred_documents", "mean_token_delay_steps", "layout"),
)
"""The keys of a row, in the order in which they are written; values that do not exist are `None`."""

MetricValue = int | float | str | None
MetricRow = Mapping[str, Any]
"""Of `MetricValue`; texts are under "layout" alone."""
Row = TypeVar("Row")

_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_LOG = logging.getLogger(__name__)


def append_metrics(path: str | os.PathLike[str], row: MetricRow) -> None:
    """Append a step to the file, made if needed; `DataError` for missing or unknown keys, or a torn last line."""
    if wrong := _wrong_keys(row.keys()):
        fix = "give exactly METRIC_KEYS, with None for a value that does not exist"
        raise DataError(f"metrics of step {row.get('step', '?')}: {wrong}; {fix}")
    line = json.dumps({key: _encode_value(row[key]) for key in METRIC_KEYS}, allow_nan=False) + "\n"
    with open(path, "a+b") as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                raise DataError(f"{path} ends in a torn line (a crash while writing); call drop_torn_line first")
        file.write(line.encode())


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, MetricValue]]:
    """Read all rows in file order; `DataError` where there is no file, or a line is no row of the fixed keys."""
    if not os.path.exists(path):
        raise DataError(f"no metrics file {path}; give the metrics.jsonl of a run")
    rows = read_rows(path, dict, "JSON object")
    for number, row in enumerate(rows, start=1):
        if wrong := _wrong_keys(row):
            where = f"{path}, line {number}"
            raise DataError(f"{where} is not a metrics row: {wrong}; is it a file of another version?")
    # "layout" is the one column of text.
    return [{k: row[k] if k == "layout" else _NON_FINITE.get(row[k], row[k]) for k in METRIC_KEYS} for row in rows]


def _whole_lines(path: str | os.PathLike[str]) -> list[bytes]:
    *lines, torn = Path(path).read_bytes().split(b"\n")
    if torn:
        _LOG.warning("%s: left out the torn last line %d (%d bytes)", path, len(lines) + 1, len(torn))
    return lines


def drop_torn_line(path: str | os.PathLike[str]) -> str:
    """Cut a torn last line off the file, as a resumed run must, and return it."""
    if not os.path.exists(path):
        return ""
    content = Path(path).read_bytes()
    keep = content.rfind(b"\n") + 1
    if keep < len(content):
        with open(path, "r+b") as file:
            file.truncate(keep)
    return content[keep:].decode(errors="replace")


def latest_per_step(rows: Iterable[MetricRow]) -> list[MetricRow]:
    """Return rows by ascending step, the last written of each: a resumed run repeats the steps it lost."""
    latest = {row["step"]: row for row in rows}
    return sorted(latest.values(), key=lambda row: float(row["step"] or 0))


def predicted_part_seconds(row: MetricRow) -> float | None:
    """Return the measured seconds that a prediction is of: all but what ranks exchange around the step."""
    step_s, exchange_s = row["step_time_s"], row["exchange_s"]
    return None if step_s is None else float(step_s) - float(exchange_s or 0.0)


def _wrong_keys(keys: Collection[str]) -> str:
    missing, unknown = [key for key in METRIC_KEYS if key not in keys], sorted(set(keys) - set(METRIC_KEYS))
    return f"missing keys {missing}, unknown keys {unknown}" if missing or unknown else ""


def _encode_value(value: MetricValue) -> MetricValue:
    is_finite = not isinstance(value, float) or math.isfinite(value)
    return value if is_finite else {"inf": "Infinity", "-inf": "-Infinity"}.get(str(value), "NaN")


def append_rows(path: str | os.PathLike[str], rows: Iterable[msgspec.Struct]) -> None:
    """Append structs to a file of JSON lines, made if needed; without rows no file is made."""
    lines = [msgspec.json.encode(row) + b"\n" for row in rows]
    if lines:
        with open(path, "ab") as file:
            file.writelines(lines)


def read_validations(path: str | os.PathLike[str]) -> tuple[Validation, ...]:
    """Read `validation.jsonl` by ascending step, of repeated passes the last; `DataError` for a line that is none."""
    latest = {(one.step, one.of_average): one for one in read_rows(path, Validation, "pass over validation data")}
    return tuple(latest[key] for key in sorted(latest))


def read_decisions(path: str | os.PathLike[str]) -> tuple[LayoutDecision, ...]:
    """Read `layouts.jsonl` by ascending step, of repeated steps the last; `DataError` for a line that is none."""
    latest = {one.step: one for one in read_rows(path, LayoutDecision, "decision about a layout")}
    return tuple(latest[step] for step in sorted(latest))


def read_rows(path: str | os.PathLike[str], kind: type[Row], what: str) -> list[Row]:
    """Read the rows of a file, none where there is no file."""
    rows = []
    for number, line in enumerate(_whole_lines(path) if os.path.exists(path) else (), start=1):
        try:
            rows.append(msgspec.json.decode(line, type=kind))
        except msgspec.MsgspecError as error:
            where = f"{path}, line {number}"
            raise DataError(f"{where} is no {what} ({error}); remove the line or restore the file") from error
    return rows
