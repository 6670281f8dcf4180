"""What `make demo` measured: both strategies on the same batches, and what was predicted beforehand.

Reads runs/demo/bench.json; make it with `make demo`. Batches were run in turn under both strategies; a step's time is
the median of the rounds, the figures are sums over batches.

    python benchmarks/demo.py [--append]
"""

import sys
from pathlib import Path

import msgspec

from evenload.bench.runs import BenchResult
from results import Row, run_benchmark

ANSWER = Path(__file__).parent.parent / "runs" / "demo" / "bench.json"


def is_there() -> bool:
    """The demo has come to the end of its comparison."""
    return ANSWER.is_file()


def measure(quick: bool) -> list[Row]:
    """Speed-up over the baseline, measured and predicted, and how far the predictions are off."""
    del quick  # nothing is run here
    if not is_there():
        sys.exit("benchmarks/demo.py: runs/demo does not hold a finished demo; run `make demo` first")
    result = msgspec.json.decode(ANSWER.read_bytes(), type=BenchResult)
    theirs, ours = result.runs
    batches = ours.batches
    case = f"make demo, {dict(result.facts)['layout']}, {len(batches)} batches, {len(batches[0].measured_s)} rounds"
    pairs = (("measured", "measured_s"), ("predicted", "predicted_s"))
    rows = [
        Row("demo", f"{ours.strategy}, {case}", f"speed-up, {how}", getattr(theirs, key) / getattr(ours, key), "x",
            theirs.strategy)
        for how, key in pairs
    ]  # fmt: skip
    for one in result.runs:
        off = one.measured_s / one.predicted_s
        rows.append(Row("demo", f"{one.strategy}, {case}", "step time", off, "x", "its prediction"))
        rows.append(Row("demo", f"{one.strategy}, {case}", "spread of rounds", one.spread, "share", "step time"))
    return rows


if __name__ == "__main__":
    run_benchmark(measure, "what the demo measured")
