"""Simulator and list schedule: tasks a second of the native core, and against its Python reference (tests/reference).

A task is one forward or backward of one pack on one stage. Both sides get the same packs of whole documents with
log-normal durations and must give equal results; times are medians over interleaved rounds.

    python benchmarks/simulator.py [--quick] [--append]
"""

import statistics

import numpy as np

import setups  # noqa: F401  # puts tests/ on the path
from evenload.schedule.packflow import packflow_list
from evenload.schedule.simulate import simulate
from evenload.types.pipeline import PackBytes, PipelineTasks
from harness import Row, alternate, median_ratio, run

from reference.list_schedule import list_schedule  # isort: skip
from reference.simulation import reference_simulation  # isort: skip

# (pipeline stages, packs each way)
SHAPES = ((4, 64), (8, 256), (16, 512))
REPEATS = 9
QUICK_REPEATS = 2
INNER = 20
"""Native calls in one timed round: a single call of a small case is shorter than the clock's jitter."""


def make_tasks(num_stages: int, num_packs: int) -> PipelineTasks:
    """Packs of whole documents, the same in both directions, with memory columns."""
    generator = np.random.default_rng(0)
    seconds = generator.lognormal(0.0, 0.5, (num_packs, num_stages)) * 1e-3
    kept = generator.integers(1, 1000, (num_packs, num_stages))
    return PipelineTasks(
        forward_s=seconds,
        backward_s=2 * seconds,
        p2p_forward_s=np.full(num_packs, 1e-5),
        p2p_backward_s=np.full(num_packs, 1e-5),
        forwards_needed=np.arange(1, num_packs + 1, dtype=np.int32),
        stage_to_rank=np.arange(num_stages, dtype=np.int32),
        held=PackBytes(
            static_bytes=np.zeros(num_stages, dtype=np.int64),
            forward_kept_bytes=kept,
            forward_temp_bytes=kept // 10,
            backward_freed_bytes=kept,
            backward_temp_bytes=kept // 5,
        ),
    )


def measure(quick: bool) -> list[Row]:
    """Both functions on every shape."""
    rows = []
    for num_stages, num_packs in SHAPES[:2] if quick else SHAPES:
        tasks = make_tasks(num_stages, num_packs)
        cap = np.full(num_stages, 1000 * (num_stages + 2), dtype=np.int64)
        actions = packflow_list(tasks, cap_bytes=cap)
        assert actions.to_schedule() == list_schedule(tasks, cap_bytes=cap).to_schedule(), "core and reference disagree"
        assert simulate(tasks, actions).end_s.tolist() == reference_simulation(tasks, actions).end_s.tolist()
        num_tasks = len(actions.kind)
        functions = {
            "simulate": (simulate, reference_simulation, (tasks, actions), {}),
            "packflow_list": (packflow_list, list_schedule, (tasks,), {"cap_bytes": cap}),
        }
        for name, (core, reference, arguments, options) in functions.items():
            variants = {
                "native": lambda f=core, a=arguments, o=options: [f(*a, **o) for _ in range(INNER)],
                "python": lambda f=reference, a=arguments, o=options: f(*a, **o),
            }
            seconds = alternate(variants, QUICK_REPEATS if quick else REPEATS)
            native = [s / INNER for s in seconds["native"]]
            case = f"{name}: {num_tasks:,} tasks, {num_stages} stages, {num_packs} packs each way"
            rate = num_tasks / statistics.median(native)
            rows.append(
                Row("simulator", case, "speed-up", median_ratio(seconds["python"], native), "x", "Python reference")
            )
            twin_rate = num_tasks / statistics.median(seconds["python"])
            rows.append(Row("simulator", case, "tasks per second", rate, "1/s", f"Python reference {twin_rate:.3g}"))
    return rows


PARTS = {"simulator": measure}

if __name__ == "__main__":
    run(PARTS)
