"""How much of the transfers of shared documents hides behind local documents' attention, forward and backward.

Two CPU processes of one thread each, `parallel.cp = 2`; a pack as `skrull` plans it: one document of 2,048 tokens that
both ranks share, and short ones of 256 tokens that lie whole on one of them. A Llama of 4 layers without grouped
queries, so that keys and values are as large as they get.

    overlapped   as the runtime does it: start a transfer, compute local documents, wait
    at once      the same calls, every transfer waited for where it starts

Waited: seconds inside `wait` in a step, the sum over all transfers, mean of the ranks; it holds what the ranks wait for
each other too, alike in both. Hidden: the share of the seconds waited at once that overlapped runs do not wait. Time:
forward and backward of a step, slowest rank. gloo moves bytes with threads of its own on the same cores, so what does
not wait may still compute slower: only the step's time tells what is gained.

    python benchmarks/overlap.py [--quick] [--append]
"""

import functools
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor
from transformers import LlamaConfig

from context_parallel import COSTS
from evenload.attention.backends import select_backend
from evenload.plan.planner import StepPlanner
from evenload.plan.problem.options import PlanOptions
from evenload.runtime.comm.cp_groups import ContextGroup, Transfer
from evenload.runtime.comm.mesh import Mesh, create_meshes
from evenload.runtime.executor import Executor
from evenload.runtime.model.hf_model import build_rank_models, build_stage_model
from evenload.runtime.optim.parameter_units import flatten_units
from evenload.runtime.replay.stage import PipelineStage
from evenload.runtime.step_source import prepare_step
from evenload.types.document import Document
from evenload.types.hf_config import model_from_hf_config
from evenload.types.layout import even_layout
from evenload.types.plan import StepPlan
from results import Row, median_ratio, run_benchmark

CP = 2
SHORT, NUM_SHORT, LONG = 256, 12, 2048
REPEATS, QUICK_REPEATS = 9, 1


class _TimedTransfer(Transfer):
    def wait(self) -> Tensor:
        start_s = time.perf_counter()
        result = super().wait()
        self.group.waited_s += time.perf_counter() - start_s  # type: ignore[attr-defined]
        return result


class TimedGroup(ContextGroup):
    """Counts the seconds spent waiting.

    Args:
        at_once: wait for every transfer where it starts.
    """

    def __init__(self, group: dist.ProcessGroup, mesh: Mesh, *, at_once: bool) -> None:
        super().__init__(group, mesh.watch)
        self.waited_s = 0.0
        self._at_once = at_once

    def _start(self, what, sent, result, start) -> Transfer:
        made = super()._start(what, sent, result, start)
        transfer = _TimedTransfer(made.result, made.works, made.sent, self, what)
        if self._at_once:
            transfer.wait()
            return replace(transfer, works=())
        return transfer


def model_config() -> LlamaConfig:
    """A Llama of 4 layers whose keys and values are as wide as its hidden states."""
    return LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=8, pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip


def planned_step() -> StepPlan:
    """One pack of a shared document and local ones.

    Raises:
        AssertionError: `skrull` planned something else.
    """
    model = model_from_hf_config(model_config().to_dict(), "llama", 4)
    lengths = [LONG, *[SHORT] * NUM_SHORT]
    layout = even_layout(model.num_layers, cp=CP)
    planner = StepPlanner(model, COSTS, layout, None, PlanOptions(max_pack_tokens=sum(lengths)), host="unlimited")
    documents = tuple(Document(doc_id=i, num_tokens=n, num_label_tokens=n - 1) for i, n in enumerate(lengths))
    plan = planner.plan(0, documents, "skrull")
    (pack,) = plan.pack_plans[0].forward
    assert sorted(piece.cp for piece in pack.slices) == [1] * NUM_SHORT + [CP], "one shared, the others local"
    return plan


def run_rank(rank: int, directory: str, repeats: int) -> None:
    """One context rank; rank 0 leaves what was measured in the directory."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/meeting", rank=rank, world_size=CP)
    plan = planned_step()
    mesh = create_meshes([plan.layout], torch.device("cpu"), timeout_s=300).start
    build = functools.partial(build_stage_model, dtype=torch.float32, device=mesh.device, weights=None, seed=0)
    models = build_rank_models(model_config(), plan.layout, 0, build)
    flatten_units(tuple(models.values()), dp=mesh.data_size)
    stages = {stage: PipelineStage(model, select_backend("auto", "cpu")) for stage, model in models.items()}
    generator = np.random.default_rng(0)
    tokens = {d.doc_id: generator.integers(0, 512, d.num_tokens, dtype=np.int32) for d in plan.documents}
    variants: dict[str, tuple[Mesh, list[TimedGroup]]] = {}
    for name in ("overlapped", "at once"):
        groups = {
            block: TimedGroup(group.process_group, mesh, at_once=name == "at once")
            for block, group in mesh.context.items()
        }
        variants[name] = replace(mesh, context=groups), list(groups.values())
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    for repeat in range(repeats + 1):
        for name, (timed_mesh, groups) in variants.items():
            step, executor = prepare_step(plan, tokens, timed_mesh), Executor(stages, timed_mesh)
            before_s = sum(group.waited_s for group in groups)
            dist.barrier()
            start_s = time.perf_counter()
            executor.run(step)
            waited_s = sum(group.waited_s for group in groups) - before_s
            dist.barrier()
            both = torch.tensor([waited_s / CP, time.perf_counter() - start_s])
            dist.all_reduce(both[:1])
            if repeat:
                found[name].append((float(both[0]), float(both[1])))
    if rank == 0:
        Path(f"{directory}/found.json").write_bytes(msgspec.json.encode(found))
    dist.barrier()
    dist.destroy_process_group()


def measure(quick: bool) -> list[Row]:
    """All rows of the benchmark."""
    with tempfile.TemporaryDirectory() as directory:
        torch.multiprocessing.spawn(run_rank, (directory, QUICK_REPEATS if quick else REPEATS), nprocs=CP)
        found = msgspec.json.decode(Path(f"{directory}/found.json").read_bytes())
    waited = {name: [pair[0] for pair in pairs] for name, pairs in found.items()}
    seconds = {name: [pair[1] for pair in pairs] for name, pairs in found.items()}
    case = f"{LONG} tokens shared by 2 ranks, {NUM_SHORT} x {SHORT} local, gloo, 1 thread a process"
    share = statistics.median(w / s for w, s in zip(waited["at once"], seconds["at once"], strict=True))
    hidden = 1 - median_ratio(waited["overlapped"], waited["at once"])
    time_ratio = median_ratio(seconds["overlapped"], seconds["at once"])
    return [
        Row("overlap", case, "waited at once", share, "share", "the step's time"),
        Row("overlap", case, "hidden", hidden, "share", "seconds waited at once"),
        Row("overlap", case, "time", time_ratio, "x", "every transfer waited for at once"),
    ]


if __name__ == "__main__":
    run_benchmark(measure, "Transfers of shared documents hidden behind local ones.")
