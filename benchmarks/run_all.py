"""`make bench`: every benchmark, rows appended to benchmarks/results (results.csv, loader.csv). Wants a quiet machine.

python benchmarks/run_all.py [--quick]      --quick tries every benchmark with small inputs and appends nothing
"""

import sys

import attention
import context_parallel
import demo
import dp_merge
import engine_steps
import host_arena
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
import swinging
from results import run_benchmark


def main() -> None:
    """All of them, one after the other."""
    arguments = ["--quick"] if "--quick" in sys.argv[1:] else ["--append"]
    modules = (
        *(simulator, planning, planning_memory, sharding, attention, replay, step_overhead, dp_merge, overlap),
        *(reduction, context_parallel, swinging, engine_steps),
        host_arena,
    )
    for module in modules:
        run_benchmark(module.measure, module.__doc__ or "", arguments)
    if demo.is_there():
        run_benchmark(demo.measure, demo.__doc__ or "", arguments)
    else:
        print("demo: left out, runs/demo does not hold a finished demo; run `make demo` first")
    for module in (loader_rates, loader_ranks, loader_start, loader_training, loader_overlap):
        loader_rows.run_benchmark(module.PARTS, module.__doc__ or "", arguments)


if __name__ == "__main__":
    main()
