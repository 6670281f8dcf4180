"""How the loader's cost grows with the ranks that read together: real processes over gloo on this machine.

Documents of 50 to 200 tokens from a memmap, a global batch of 4,096 of them, `best_fit`, as many replicas as ranks;
each rank reads its share, all agree on the plan, tokens are exchanged, each collates its own packs. Processor time of
the thread of rank 0 (which plans) and of the last rank, waiting not counted, per document of the *global* batch: what
does not fall with the ranks is what every rank does for all documents. With more ranks than cores, seconds on a clock
would say nothing.

    python benchmarks/loader_ranks.py [--quick] [--append]
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from evenload.cost.analytic import analytic_coefficients
from evenload.data.hub import model_from
from evenload.data.loader import GlobalBatchLoader
from evenload.feed.collate import collate_pack
from evenload.feed.step_maker import StepMaker
from evenload.plan.planner import RunPlanner, StepPlanner
from evenload.plan.problem.options import PlanOptions
from evenload.runtime.comm.torch_peers import TorchPeers
from evenload.types.cluster_catalog import cluster_from
from evenload.types.layout import even_layout
from evenload.types.plan import encode_plan
from loader_rates import PACK_WINDOW, WARM_UP_STEPS, token_config
from loader_rows import LoaderRow, median_and_spread, run_benchmark
from loader_sources import short_lengths, work_directory, write_tokens

RANKS, QUICK_RANKS = (1, 2, 4, 8), (1, 2)
DOCUMENTS, BATCH = 60_000, 4_096
REPEATS, QUICK_REPEATS = 3, 1


def run_rank(directory: Path, name: str, rank: int, size: int) -> dict[str, Any]:
    """Processor seconds of this rank's main thread, per document of the global batches."""
    dist.init_process_group("gloo", init_method=f"file://{directory / name}", rank=rank, world_size=size)
    group = dist.group.WORLD
    assert group is not None
    model = model_from("llama-7b")
    layout = even_layout(model.num_layers, dp=size)
    coefficients = analytic_coefficients(model, cluster_from(f"h100x{size}"), layout)
    planner = StepPlanner(model, coefficients, layout, None, PlanOptions(max_pack_tokens=PACK_WINDOW), host="unlimited")
    loader = GlobalBatchLoader(token_config(directory / "short", BATCH, 1), peers=TorchPeers(group))
    planner = RunPlanner(planner, "best_fit", may_delay=False)
    maker = StepMaker(loader, planner, replicas=lambda layout: range(size), max_pack_tokens=PACK_WINDOW)
    step, documents, plan_bytes, start_s = 0, 0, 0, 0.0
    while (planned := maker.next()) is not None:
        for pack in planned.plan.pack_plans[rank].forward:
            collate_pack(pack, planned.tokens)
        step += 1
        if step == WARM_UP_STEPS:
            start_s = time.thread_time()
        elif step > WARM_UP_STEPS:
            documents += len(planned.plan.documents)
            plan_bytes += len(encode_plan(planned.plan)) if step == WARM_UP_STEPS + 1 else 0
    taken_s = time.thread_time() - start_s
    dist.destroy_process_group()
    return {"us": taken_s / documents * 1e6, "plan_bytes": plan_bytes / BATCH}


def measure(quick: bool) -> list[LoaderRow]:
    """Every number of ranks."""
    rows = []
    with work_directory() as directory:
        write_tokens(directory / "short", short_lengths(DOCUMENTS // (2 if quick else 1)))
        for size in QUICK_RANKS if quick else RANKS:
            found: list[list[dict[str, Any]]] = []
            for repeat in range(QUICK_REPEATS if quick else REPEATS):
                command = [sys.executable, str(Path(__file__)), "--child", str(directory), f"meet{size}.{repeat}"]
                children = [
                    subprocess.Popen([*command, str(rank), str(size)], stdout=subprocess.PIPE, text=True)
                    for rank in range(size)
                ]
                outputs = [child.communicate()[0] for child in children]
                if any(child.returncode for child in children):
                    sys.exit(f"a rank of {size} failed")
                found.append([json.loads(output.splitlines()[-1]) for output in outputs])
            case = f"{size} ranks, global batch {BATCH:,}, best_fit"
            for name, index in (("rank 0", 0), ("last rank", -1)):
                value, spread = median_and_spread([one[index]["us"] for one in found])
                rows.append(LoaderRow("ranks", case, f"time of {name}", value, "us/document", spread))
            rows.append(LoaderRow("ranks", case, "plan on the wire", found[0][0]["plan_bytes"], "B/document"))
    return rows


PARTS = {"ranks": measure}

if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(run_rank(Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))))
    else:
        run_benchmark(PARTS, "the loader on several ranks")
