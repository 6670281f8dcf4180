"""The demo's two runs compared: what `make demo` measured and what was predicted beforehand.

Both runs train the same batches, so ratios are formed per step; the first step, which warms caches up, is left
out. Reads runs/demo; make it with `make demo`.

    python benchmarks/demo.py [--append]
"""

import statistics
import sys
from pathlib import Path

from evenload.report.metrics_file import latest_per_step, read_metrics
from results import Row, run_benchmark

RUN = Path(__file__).parent.parent / "runs" / "demo"
BASELINE = "best_fit"


def is_there() -> bool:
    """The demo has run to its end."""
    return (RUN / "metrics.jsonl").is_file() and (RUN / BASELINE / "run.json").is_file()


def measure(quick: bool) -> list[Row]:
    """Speed-up over the baseline, measured and predicted, and how far the predictions are off."""
    del quick  # nothing is run here
    if not is_there():
        sys.exit("benchmarks/demo.py: runs/demo does not hold a finished demo; run `make demo` first")
    ours, theirs = (
        latest_per_step(read_metrics(directory / "metrics.jsonl"))[1:] for directory in (RUN, RUN / BASELINE)
    )
    if [row["step"] for row in ours] != [row["step"] for row in theirs]:
        sys.exit("benchmarks/demo.py: the two runs of runs/demo have different steps; run `make demo` again")
    case = f"make demo, {ours[0]['layout']}, {len(ours)} steps"
    rows = []
    for metric, key in (("speed-up, measured", "step_time_s"), ("speed-up, predicted", "predicted_step_time_s")):
        ratios = [float(b[key] or 0) / float(a[key] or 1) for a, b in zip(ours, theirs, strict=True)]
        rows.append(Row("demo", f"slimpack, {case}", metric, statistics.median(ratios), "x", BASELINE))
    for name, steps in (("slimpack", ours), (BASELINE, theirs)):
        ratios = [float(row["step_time_s"] or 0) / float(row["predicted_step_time_s"] or 1) for row in steps]
        rows.append(Row("demo", f"{name}, {case}", "step time", statistics.median(ratios), "x", "its prediction"))
        bubble = statistics.median(float(row["bubble_fraction"] or 0) for row in steps)
        rows.append(Row("demo", f"{name}, {case}", "bubble", bubble, "share", "all ranks' step time"))
    return rows


if __name__ == "__main__":
    run_benchmark(measure, "the demo's runs compared")
