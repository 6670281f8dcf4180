"""What `make demo` measured: both strategies on the same batches, and what was predicted beforehand.

Reads runs/demo/bench.json; make it with `make demo`. Batches were run in turn under both strategies; a step's time is
the median of the rounds, the figures are sums over batches.

    python benchmarks/demo.py [--append]
"""

import sys
from collections.abc import Iterator

import msgspec

from evenload.bench.results import BenchResult
from harness import Row, run
from setups import ROOT

ANSWER = ROOT / "runs" / "demo" / "bench.json"


def measure(quick: bool) -> Iterator[Row]:
    """Speed-up over the baseline, measured and predicted, and how far the predictions are off."""
    del quick  # nothing is run here
    if not ANSWER.is_file():
        sys.exit("benchmarks/demo.py: runs/demo does not hold a finished demo; run `make demo` first")
    result = msgspec.json.decode(ANSWER.read_bytes(), type=BenchResult)
    theirs, ours = result.runs
    for one in result.ratios:
        print(f"{one.by_round}; predicted {one.predicted:.2f}: {one.verdict}")
    batches = ours.batches
    case = f"make demo, {dict(result.facts)['layout']}, {len(batches)} batches, {len(batches[0].measured_s)} rounds"
    for how, key in (("measured", "measured_s"), ("predicted", "predicted_s")):
        ratio = getattr(theirs, key) / getattr(ours, key)
        yield Row("demo", f"{ours.strategy}, {case}", f"speed-up, {how}", ratio, "x", theirs.strategy)
    for one in result.runs:
        off = one.measured_s / one.predicted_s
        yield Row("demo", f"{one.strategy}, {case}", "step time", off, "x", "its prediction")
        yield Row("demo", f"{one.strategy}, {case}", "spread of rounds", one.spread, "share", "step time")


PARTS = {"demo": measure}

if __name__ == "__main__":
    run(PARTS)
