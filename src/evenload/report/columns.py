"""Columns of the strategy comparison, shared by the terminal's table and the page's.

Keys are those of `evenload plan --json`, plus what only a trained run knows. A column is
shown when any row has a value for it; keys without a column are carried by the files, not by the table.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from evenload.report.units import (
    format_count,
    format_interval,
    format_layout,
    format_percent,
    format_ratio,
    format_seconds,
)
from evenload.types.length_unit import LengthUnit, in_unit
from evenload.types.scaled_units import MISSING, format_bytes
from evenload.types.time_split import TimeSplit

TEXT_COLUMNS = frozenset({"time_split", "cuts", "schedule", "sharding", "layout"})
"""Keys of columns that hold words and stand on the left of their cell."""
_SHOWN_LOSSES = 2
_LEAST_SHOWN_LOSS = 0.001


class Column(NamedTuple):
    """The key of a column's values, its heading, how to print a value, and what it means."""

    key: str
    heading: str
    format: Callable[[Any], str]
    meaning: str


def format_losses(time_split: object) -> str:
    """The two largest losses of a `TimeSplit` (as builtins) with their share of the step: "dp imbalance 12.0 %"."""
    split = msgspec.convert(time_split, TimeSplit)
    total_s = split.total_s()
    largest = split.losses()[:_SHOWN_LOSSES]
    shown = [
        f"{label} {format_percent(seconds / total_s)}"
        for label, seconds in largest
        if seconds > _LEAST_SHOWN_LOSS * total_s
    ]
    return ", ".join(shown) or MISSING


COLUMNS = (
    Column("measured_step_time_s", "step\nmeasured", format_seconds, "median measured seconds of an optimizer step"),
    Column("mean_step_time_s", "step\npredicted", format_seconds, "mean simulated seconds of an optimizer step"),
    Column(
        "step_time_interval_s",
        "90 % of\nsteps",
        format_interval,
        "where nine of ten measured step times lie, predicted",
    ),
    Column(
        "fraction_of_bound",
        "of bound",
        format_percent,
        "all useful work at the cost model's rates on all devices, without waiting, over the predicted step time",
    ),
    Column(
        "fraction_of_layout_bound",
        "of layout\nbound",
        format_percent,
        "the least time of any plan in this layout (its busiest stage, transfers and update) over the predicted",
    ),
    Column(
        "mfu",
        "MFU",
        format_percent,
        "the physical bound (model FLOPs at the devices' peak) over the predicted step time",
    ),
    Column(
        "speedup_over_baseline",
        "vs\nbest_fit",
        lambda ratio: f"{ratio:.2f}×",
        "predicted speed relative to best_fit in the windows that suit it best",
    ),
    Column("tokens_per_s_per_device", "tokens/s\ndevice", format_count, "real tokens a second and device, predicted"),
    Column("measured_tokens_per_s", "tokens/s\nmeasured", format_count, "real tokens a second, all devices"),
    Column("bubble_fraction", "bubble", format_percent, "share of rank time in which nothing is computed"),
    Column("imbalance_forward", "fwd\nmax/mean", format_ratio, "slowest forward pack over the mean"),
    Column("imbalance_backward", "bwd\nmax/mean", format_ratio, "slowest backward pack over the mean"),
    Column("imbalance_dp", "dp\nmax/mean", format_ratio, "slowest replica over the mean"),
    Column("peak_memory_bytes", "memory\npeak", format_bytes, "most bytes any device holds at any time"),
    Column(
        "peak_host_bytes_per_node",
        "host\na node",
        format_bytes,
        "most memory of a node's host that offloaded activations take",
    ),
    Column("cap_violations", "over\ncap", format_count, "packs over the memory cap"),
    Column("num_packs_forward", "packs\nfwd", format_count, "forward packs of a step"),
    Column("num_packs_backward", "packs\nbwd", format_count, "backward packs of a step"),
    Column("deferred_tokens", "tokens\ndeferred", format_count, "tokens moved to a later step"),
    Column("dropped_tokens", "tokens\ndropped", format_count, "tokens never trained"),
    Column("plan_time_s", "plan\ntime", format_seconds, "seconds to plan a step"),
    Column("time_split", "lost to", format_losses, "the two largest losses beside useful work, share of the step"),
    Column("cuts", "cuts", str, "whole documents, or slices: the same forward and backward (symmetric), or not"),
    Column("schedule", "schedule", str, "in which order pipeline ranks run packs (plan.options.schedule)"),
    Column("sharding", "shared\nby", str, "how context-parallel ranks share packs (plan.options.cp_sharding)"),
    Column("layout", "layout", format_layout, "sizes of the parallel dimensions"),
)
_SHOWN_ONLY_IF_NOT_ZERO = frozenset({"cap_violations", "deferred_tokens", "dropped_tokens", "peak_host_bytes_per_node"})


def shown_columns(rows: Iterable[Mapping[str, object]], unit: LengthUnit = "tokens") -> tuple[Column, ...]:
    """The columns for which any row has a value; counts of bad things only when one is not zero."""
    rows = tuple(rows)
    return tuple(
        column._replace(heading=in_unit(column.heading, unit), meaning=in_unit(column.meaning, unit))
        for column in COLUMNS
        if any(
            row.get(column.key) not in (None, "")
            and (row[column.key] != 0 or column.key not in _SHOWN_ONLY_IF_NOT_ZERO)
            for row in rows
        )
    )


def format_cell(column: Column, row: Mapping[str, object]) -> str:
    """A row's value in a column; a dash when it has none."""
    value = row.get(column.key)
    return MISSING if value in (None, "") else column.format(value)


def is_feasible(row: Mapping[str, object]) -> bool:
    """Whether a strategy can run; rows of trained runs do not say and did."""
    return row.get("feasible", True) is not False
