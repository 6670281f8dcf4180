"""`logged_metrics`: a step's row under the names that people know from other trainers, for trackers of experiments.

Names stay: "train/..." is what is learnt, "perf/..." how fast, "time/..." seconds of a step, "memory/..." bytes;
"validation/..." losses of the validation data, in all, by length and by source.
"""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # needs torch, and names of metrics do not
    from evenload.runtime.step_metrics import StepReport

STEP = "train/global_step"
"""The axis of all others."""
NAMES = {
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "lr": "train/learning_rate",
    "total_tokens": "train/total_tokens",
    "total_label_tokens": "train/total_label_tokens",
    "tokens": "train/tokens",
    "documents": "train/documents",
    "deferred_documents": "train/deferred_documents",
    "tokens_per_s": "perf/tokens_per_s",
    "mfu": "perf/mfu",
    "mfu_of_data_sheet": "perf/mfu_of_data_sheet",
    "bubble_fraction": "perf/bubble_fraction",
    "imbalance_forward": "perf/imbalance_forward",
    "imbalance_backward": "perf/imbalance_backward",
    "imbalance_dp": "perf/imbalance_dp",
    "pack_efficiency": "perf/pack_efficiency",
    "step_time_s": "time/step_s",
    "predicted_step_time_s": "time/predicted_step_s",
    "data_wait_s": "time/data_wait_s",
    "plan_time_s": "time/plan_s",
    "reduction_s": "time/reduction_s",
    "gather_s": "time/gather_s",
    "elapsed_s": "time/elapsed_s",
    "peak_memory_bytes": "memory/peak_bytes",
    "predicted_peak_memory_bytes": "memory/predicted_peak_bytes",
}
"""Keys of `metrics.jsonl` and what trackers call them; others are in the file alone."""


def reported_metrics(report: "StepReport") -> dict[str, float]:
    """What a tracker is told of a step and, where its weights were validated, of the losses found."""
    return logged_metrics(report.row) | ({} if report.validation is None else report.validation.metrics())


def logged_metrics(row: Mapping[str, int | float | str | None]) -> dict[str, float]:
    """What a tracker is told of a step; what does not exist is left out. A loss that is not finite is told."""
    found = {name: float(value) for key, name in NAMES.items() if (value := row[key]) is not None}
    return {name: value for name, value in found.items() if math.isfinite(value) or name.startswith("train/")}
