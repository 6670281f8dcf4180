"""`make bench`: every benchmark, rows appended to benchmarks/results (results.csv, loader.csv). Wants a quiet machine.

python benchmarks/run_all.py [--quick]      --quick tries every benchmark with small inputs and appends nothing
"""

import sys

import attention
import context_overlap
import demo
import dp_merge
import engine_steps
import feedback
import loader_overlap
import loader_ranks
import loader_rates
import loader_rows
import loader_start
import loader_training
import overlap
import planning
import planning_memory
import reduction
import replay
import sharding
import simulator
import step_overhead
import tensor_halves
from results import run_benchmark


def main() -> None:
    """All of them, one after the other."""
    arguments = ["--quick"] if "--quick" in sys.argv[1:] else ["--append"]
    for module in (simulator, planning, planning_memory, sharding, attention, replay, step_overhead, dp_merge, overlap):
        run_benchmark(module.measure, module.__doc__ or "", arguments)
    run_benchmark(reduction.measure, reduction.__doc__ or "", arguments)
    run_benchmark(context_overlap.measure, context_overlap.__doc__ or "", arguments)
    run_benchmark(tensor_halves.measure, tensor_halves.__doc__ or "", arguments)
    run_benchmark(feedback.measure, feedback.__doc__ or "", arguments)
    run_benchmark(engine_steps.measure, engine_steps.__doc__ or "", arguments)
    if demo.is_there():
        run_benchmark(demo.measure, demo.__doc__ or "", arguments)
    else:
        print("demo: left out, runs/demo does not hold a finished demo; run `make demo` first")
    for module in (loader_rates, loader_ranks, loader_start, loader_training, loader_overlap):
        loader_rows.run_benchmark(module.PARTS, module.__doc__ or "", arguments)


if __name__ == "__main__":
    main()
