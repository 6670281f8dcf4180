"""Replay against plain autograd: time and memory of the same documents' losses and gradients, one thread.

    replay      packs through `PipelineStage` (forward packs, then backward packs as soon as they may run)
    recompute   the same; products of linear layers are made again in backward
    plain       transformers' own model with sdpa attention, every document by itself, one `backward` per group of
                documents that replay holds at the same time, so that both keep the same documents' activations

Time is the median over interleaved rounds of each / plain. For many short documents the ratio also holds what
packing itself saves (one matrix product for 16 documents); the rows of one long document show replay alone.
Memory is the process's peak resident set (VmHWM) over what it held after a warm-up that allocates all gradients,
every variant in a process of its own. Not `ru_maxrss`: a child starts with its parent's.

    python benchmarks/replay.py [--quick] [--append]
"""

import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig

from cpu_ranks import llama  # puts tests/ on the path, too
from evenload.attention.backends import select_backend
from evenload.feed.collate import collate_pack
from evenload.runtime.model.hf_model import build_stage_model
from evenload.runtime.optim.data_parallel import flatten_units
from evenload.runtime.replay.rank_packs import PackTokens, pack_ranges
from evenload.runtime.replay.stage import PipelineStage
from evenload.runtime.replay.store import ActivationStore
from evenload.types.columns import SliceColumns, WorkCurve, whole_document_columns
from evenload.types.document import ActivationPolicy, MicroPack, PackPlan
from harness import Row, alternate, median_ratio, run

from reference.partition import partition_by_work  # isort: skip

REPEATS = 7
QUICK_REPEATS = 2
BASELINE = "plain transformers sdpa autograd"
# (documents, tokens each, packs): short ones, medium ones, one long one.
SHAPES = {"short": (32, 64, 2), "medium": (8, 512, 2), "long": (1, 4096, 1)}
QUICK_SHAPES = {"medium": (4, 512, 2), "long": (1, 2048, 1)}
# Forward and backward packs of the asymmetric cases.
ASYMMETRIC_PACKS = (5, 4)


def main_config() -> LlamaConfig:
    """A Llama of 4 layers, large enough that matrix products, not Python, take the time."""
    return llama(256, 4, heads=4, key_heads=2)


def pack_plan(lengths: np.ndarray, num_packs: int, cuts: str) -> PackPlan:
    """Whole documents dealt to packs, or independent forward and backward cuts of equal work."""
    ids = np.arange(len(lengths))
    if cuts == "symmetric":
        per_pack = -(-len(lengths) // num_packs)
        groups = [list(range(lo, min(lo + per_pack, len(lengths)))) for lo in range(0, len(lengths), per_pack)]
        forward = backward = whole_document_columns(groups, lengths)
    else:
        forward, backward = (_equal_work(lengths, m, b) for m, b in zip(ASYMMETRIC_PACKS, (False, True), strict=True))
    return PackPlan(
        dp_rank=0,
        forward=forward.packs("forward", forward.pack_slices(ids), np.zeros(forward.num_packs)),
        backward=backward.packs("backward", backward.pack_slices(ids), np.zeros(backward.num_packs)),
    )


def _equal_work(lengths: np.ndarray, num_packs: int, last_first: bool) -> SliceColumns:
    # A pair weighs 1/1000 of a token: attention matters, so forward and backward cuts fall apart.
    work = WorkCurve(linear_s=1.0, attention_s=((0.0025 if last_first else 0.001, 0),))
    order = np.arange(len(lengths), dtype=np.int32)
    return partition_by_work(lengths, order, work, num_packs, last_first=last_first)


Step = Callable[[PackPlan, dict[int, np.ndarray]], object]


class StageSteps:
    """Steps through a single stage that holds all layers.

    Args:
        weights: a Hugging Face directory; None = random.
    """

    def __init__(self, config: PretrainedConfig, weights: str | None = None) -> None:
        layers = (0, config.num_hidden_layers)
        model = build_stage_model(
            config, layers=layers, dtype=torch.float32, device=torch.device("cpu"), weights=weights, seed=0
        )
        self.buffers = flatten_units(model, dp=1)
        self._stage = PipelineStage(model, select_backend("auto", "cpu"))

    def zero_gradients(self) -> None:
        """As before a step of training."""
        for buffer in self.buffers:
            buffer.grads.zero_()

    def add_gradients(
        self, plan: PackPlan, tokens: dict[int, np.ndarray], policy: ActivationPolicy = "replay"
    ) -> float:
        """Forward packs, and backward packs as soon as they may run; returns the loss."""
        labels = sum(len(t) - 1 for t in tokens.values())
        store = ActivationStore(
            {d: len(t) for d, t in tokens.items()},
            [pack_ranges(pack) for pack in plan.backward],
            policies=dict.fromkeys(tokens, policy),
        )
        done, loss = 0, 0.0
        for pack, count in zip(plan.backward, plan.forwards_needed(), strict=True):
            while done < count:
                self._stage.forward(_loaded(plan.forward[done], tokens), None, store)
                done += 1
            loss += self._stage.backward(_loaded(pack, tokens), None, store, labels)[1].item()
        store.check_empty()
        return loss


def _loaded(pack: MicroPack, tokens: dict[int, np.ndarray]) -> PackTokens:
    batch = collate_pack(pack, tokens)
    ids, targets, positions = (torch.from_numpy(c) for c in (batch.token_ids, batch.targets, batch.positions))
    return PackTokens(pack_ranges(pack), ids, targets, positions)


def make_replay(policy: ActivationPolicy = "replay", config: PretrainedConfig | None = None) -> Step:
    """Gradients are zeroed first, as in training."""
    steps = StageSteps(config or main_config())

    def step(plan: PackPlan, tokens: dict[int, np.ndarray]) -> None:
        steps.zero_gradients()
        steps.add_gradients(plan, tokens, policy)

    return step


def make_plain(config: PretrainedConfig | None = None) -> Step:
    """The same loss by transformers and autograd."""
    config = config or main_config()
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(torch.float32)

    def step(plan: PackPlan, tokens: dict[int, np.ndarray]) -> None:
        model.zero_grad(set_to_none=False)
        labels = sum(len(t) - 1 for t in tokens.values())
        for group in resident_groups(plan):
            total = torch.zeros(())
            for doc in group:
                row = torch.from_numpy(tokens[doc]).long()
                logits = model(row[None]).logits[0, :-1]
                total = total + nn.functional.cross_entropy(logits, row[1:], reduction="sum") / labels
            total.backward()

    return step


def resident_groups(plan: PackPlan) -> list[list[int]]:
    """Documents that replay holds at the same time: a pack of whole ones, else all."""
    if plan.forwards_needed() == list(range(1, len(plan.backward) + 1)):
        return [[s.doc_id for s in pack.slices] for pack in plan.forward]
    return [sorted({s.doc_id for pack in plan.forward for s in pack.slices})]


MAKERS: dict[str, Callable[[], Step]] = {
    "replay": make_replay,
    "recompute": partial(make_replay, "recompute"),
    "plain": make_plain,
}


def make_tokens(lengths: np.ndarray) -> dict[int, np.ndarray]:
    """Random tokens by document id."""
    generator = np.random.default_rng(0)
    return {i: generator.integers(0, 4096, n).astype(np.int32) for i, n in enumerate(lengths.tolist())}


def peak_growth_bytes(variant: str, shape: tuple[int, int, int], cuts: str) -> int:
    """Measured in a process of its own."""
    command = [sys.executable, str(Path(__file__)), "--child", json.dumps([variant, shape, cuts])]
    return int(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)


def measure_in_child(variant: str, shape: list[int], cuts: str) -> None:
    """Print the peak of one step over what the process held before it, in bytes."""
    torch.set_num_threads(1)
    documents, length, num_packs = shape
    lengths, tiny = np.full(documents, length, dtype=np.int64), np.full(1, 8, dtype=np.int64)
    step = MAKERS[variant]()
    step(pack_plan(tiny, 1, "symmetric"), make_tokens(tiny))
    plan = pack_plan(lengths, num_packs, cuts)
    print(growth_bytes(lambda: step(plan, make_tokens(lengths)), f"{variant} {shape} {cuts}"))


def growth_bytes(step: Callable[[], object], what: str) -> int:
    """The peak of a step over what the process holds before it."""
    resident, earlier_peak = resident_bytes("VmRSS"), resident_bytes("VmHWM")
    step()
    peak = resident_bytes("VmHWM")
    if peak <= earlier_peak:
        sys.exit(f"{what}: the step stays below the peak of starting up; use a larger shape")
    return peak - resident


def resident_bytes(name: str) -> int:
    """VmRSS (now) or VmHWM (peak) of this process, as Linux counts."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def measure(quick: bool) -> list[Row]:
    """Every shape, or one, with symmetric whole-document packs and with asymmetric cuts."""
    torch.set_num_threads(1)
    variants = {name: make() for name, make in MAKERS.items()}
    rows = []
    for name, shape in (QUICK_SHAPES if quick else SHAPES).items():
        documents, length, num_packs = shape
        lengths = np.full(documents, length, dtype=np.int64)
        tokens = make_tokens(lengths)
        for cuts in ("symmetric", "asymmetric"):
            plan = pack_plan(lengths, num_packs, cuts)
            packs = f"{len(plan.forward)} forward {len(plan.backward)} backward packs"
            case = f"{name}: {documents} x {length} tokens, {cuts}, {packs}"
            steps = {variant: (lambda s=step, p=plan, t=tokens: s(p, t)) for variant, step in variants.items()}
            seconds = alternate(steps, QUICK_REPEATS if quick else REPEATS)
            growth = {variant: peak_growth_bytes(variant, shape, cuts) for variant in variants}
            for variant in variants:
                if variant != "plain":
                    ratio = median_ratio(seconds[variant], seconds["plain"])
                    rows.append(Row(variant, case, "time", ratio, "x", BASELINE))
                    held = growth[variant] / growth["plain"]
                    rows.append(Row(variant, case, "peak memory", held, "x", BASELINE))
    return rows


PARTS = {"replay": measure}

if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        measure_in_child(*json.loads(sys.argv[2]))
    else:
        run(PARTS)
