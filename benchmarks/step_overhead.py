"""What a step costs besides tensor work: Python of the executor, the store, replay and transformers' modules.

    twin          the step of a model of width 16 whose slices have 1/32 of the tokens: the same actions, packs, slices,
                  layers and calls, next to no tensor work. Its time over that of the full step. Too high: it holds the
                  dispatch of every torch operator, and what work there is left
    torch alone   transformers' own model of the twin's width under plain autograd, every pack as one sequence: what any
                  eager training pays for modules and autograd
    own           the twin without that: what Evenload adds, kernel calls per document included

A step is `Executor.run` on one rank and one thread, of one or two packs and as many backward packs: preparing packs
runs in another thread, reduction and optimizer are left out of both sides. With more threads or a faster device tensor
work shrinks and microseconds stay, so they have rows of their own: the twin's time for a pack and layer, forward and
backward together. Times are the process's CPU time, the least of several, since others only add to it.

    python benchmarks/step_overhead.py [--quick] [--append]
"""

import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from cpu_ranks import llama, rank_stages
from evenload.runtime.comm.mesh import Mesh, create_meshes
from evenload.runtime.executor import Executor
from evenload.runtime.step_source import prepare_step
from evenload.types.document import Document, Slice
from evenload.types.layout import even_layout
from evenload.types.micropack import Direction, MicroPack, PackPlan
from evenload.types.plan import PackTimes, Prediction, StepPlan, seal
from evenload.types.schedule import Action, Schedule
from harness import Row, run

LAYERS, WIDTH, TWIN_WIDTH = 4, 512, 16
VOCABULARY = 2048
SHRINK = 32
REPEATS, TWIN_REPEATS = 2, 25
PACK_TOKENS = (2048, 4096, 8192)
QUICK_LAYERS = 2

Cut = list[list[tuple[int, int, int]]]
"""Packs of (document, start, stop)."""


def cases(pack_tokens: int) -> dict[str, tuple[Cut, Cut]]:
    """Forward and backward packs of about `pack_tokens` tokens, in words; every mix at the smallest size."""
    tiny, short = _short(pack_tokens, 20), _short(pack_tokens, 80)
    many = {f"{len(tiny)} documents a pack": (_whole([tiny]), _whole([tiny]))}
    if pack_tokens > PACK_TOKENS[0]:
        return many
    even = [pack_tokens // 2] * 2
    return {
        "2 documents a pack": (_whole([even]), _whole([even])),
        f"{len(short)} documents a pack": (_whole([short]), _whole([short])),
        **many,
        "1 document cut in 2 forward and 3 backward, 8 short ones": _sliced(pack_tokens),
    }


def _short(total: int, mean: int) -> list[int]:
    """Lengths around a mean, drawn from a log-normal, with that total."""
    draw = np.random.default_rng(0).lognormal(np.log(mean), 0.5, size=total // 4).astype(int).clip(2)
    count = int(np.searchsorted(draw.cumsum(), total))
    return [*draw[:count].tolist(), total - int(draw[:count].sum())]


def _whole(packs: list[list[int]]) -> Cut:
    doc, cut = 0, []
    for lengths in packs:
        cut.append([(doc + i, 0, n) for i, n in enumerate(lengths)])
        doc += len(lengths)
    return cut


def _sliced(pack_tokens: int) -> tuple[Cut, Cut]:
    """Two packs of tokens; slices with prefixes, forward and backward cut differently."""
    long = pack_tokens * 3 // 2
    short = [(1 + i, 0, pack_tokens // 16) for i in range(8)]
    forward = [[(0, 0, pack_tokens)], [(0, pack_tokens, long), *short]]
    third = long // 3
    backward = [[(0, 2 * third, long), *short[:4]], [(0, third, 2 * third), *short[4:]], [(0, 0, third)]]
    return forward, backward


def shrunk(cut: Cut) -> Cut:
    """The same slices with fewer tokens, at least one each."""
    return [[(doc, -(-start // SHRINK), -(-stop // SHRINK)) for doc, start, stop in pack] for pack in cut]


def step_plan(forward: Cut, backward: Cut, layers: int) -> StepPlan:
    """One rank's step: every backward as soon as its forwards are done."""
    packs = PackPlan(dp_rank=0, forward=_packs("forward", forward), backward=_packs("backward", backward))
    actions: list[Action] = []
    done = 0
    for pack, needed in zip(packs.backward, packs.forwards_needed(), strict=True):
        actions += [Action(kind="F", stage=0, pack=index) for index in range(done, needed)]
        done = max(done, needed)
        actions.append(Action(kind="B", stage=0, pack=pack.index))
    lengths: dict[int, int] = {}
    for doc, _, stop in (piece for pack in forward for piece in pack):
        lengths[doc] = max(stop, lengths.get(doc, 0))
    documents = tuple(Document(doc_id=d, num_tokens=n, num_label_tokens=n - 1) for d, n in lengths.items())
    times = PackTimes(
        forward_s=((0.0,),) * len(forward),
        backward_s=((0.0,),) * len(backward),
        p2p_forward_s=(0.0,) * len(forward),
        p2p_backward_s=(0.0,) * len(backward),
    )
    return seal(
        StepPlan(
            step=0,
            strategy="by_hand",
            layout=even_layout(layers),
            documents=documents,
            num_label_tokens=sum(n - 1 for n in lengths.values()),
            pack_plans=(packs,),
            schedules=(Schedule(ranks=(tuple(actions),)),),
            times=(times,),
            predicted=Prediction(step_time_s=0.0, per_replica_s=(0.0,), peak_memory_bytes=0),
        )
    )


def _packs(direction: Direction, cut: Cut) -> tuple[MicroPack, ...]:
    return tuple(
        MicroPack(index=i, direction=direction, slices=tuple(Slice(doc_id=d, start=a, stop=b) for d, a, b in pack))
        for i, pack in enumerate(cut)
    )


def model_config(width: int, layers: int) -> LlamaConfig:
    """A Llama; the narrow one has the same modules."""
    heads = max(2, width // 64)
    vocabulary = VOCABULARY if width > TWIN_WIDTH else TWIN_WIDTH
    return llama(width, layers, heads=heads, key_heads=heads // 2, vocabulary=vocabulary)


def make_executor(mesh: Mesh, width: int, layers: int) -> Executor:
    """Of a model of that width, all layers on one stage."""
    return Executor(rank_stages(model_config(width, layers), mesh), mesh)


def cpu_seconds(work: Callable[[], object], repeats: int) -> float:
    """Of this process, which has one busy thread and waits for nobody; the least, since others only add to it."""
    seconds = []
    for _ in range(repeats):
        start_s = time.process_time()
        work()
        seconds.append(time.process_time() - start_s)
    return min(seconds)


def run_step(mesh: Mesh, executor: Executor, plan: StepPlan, vocabulary: int) -> Callable[[], object]:
    """One step, prepared beforehand."""
    rng = np.random.default_rng(0)
    tokens = {d.doc_id: rng.integers(0, vocabulary, d.num_tokens).astype(np.int32) for d in plan.documents}
    step = prepare_step(plan, tokens, mesh)
    return lambda: executor.run(step).trace


def plain_step(forward: Cut, layers: int) -> Callable[[], object]:
    """Transformers' own model of the twin's width; every pack one sequence."""
    config = model_config(TWIN_WIDTH, layers)
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(torch.float32)
    packs = [torch.randint(0, TWIN_WIDTH, (1, sum(b - a for _, a, b in pack))) for pack in forward]

    def step() -> None:
        model.zero_grad(set_to_none=False)
        for ids in packs:
            logits = model(ids).logits[0, :-1]
            nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum").backward()

    return step


def measure(quick: bool) -> list[Row]:
    """Every pack size and mix of documents."""
    torch.set_num_threads(1)
    layers = QUICK_LAYERS if quick else LAYERS
    with TemporaryDirectory() as folder:
        store = dist.FileStore(str(Path(folder) / "store"), 1)  # type: ignore[reportPrivateImportUsage]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            return _measure(quick, layers)
        finally:
            dist.destroy_process_group()


def _measure(quick: bool, layers: int) -> list[Row]:
    mesh = create_meshes([even_layout(layers)], torch.device("cpu"), timeout_s=60).start
    full, twin = (make_executor(mesh, width, layers) for width in (WIDTH, TWIN_WIDTH))
    rows = []
    for pack_tokens in PACK_TOKENS[:1] if quick else PACK_TOKENS:
        for words, (forward, backward) in cases(pack_tokens).items():
            case = f"{pack_tokens} tokens a pack, {words}, {layers} layers of width {WIDTH}"
            step = run_step(mesh, full, step_plan(forward, backward, layers), VOCABULARY)
            small = shrunk(forward), shrunk(backward)
            twin_step = run_step(mesh, twin, step_plan(*small, layers), TWIN_WIDTH)
            plain = plain_step(small[0], layers)
            step_s = cpu_seconds(step, 1 if quick else REPEATS)
            twin_s, plain_s = (cpu_seconds(work, TWIN_REPEATS) for work in (twin_step, plain))
            baseline = "the step's time"
            rows += [
                Row("step", case, "twin", twin_s / step_s, "share", baseline),
                Row("step", case, "torch alone", plain_s / step_s, "share", baseline),
                Row("step", case, "own", (twin_s - plain_s) / step_s, "share", baseline),
                Row("step", case, "twin a pack and layer", twin_s * 1e6 / layers / len(backward), "us", ""),
                Row("step", case, "torch alone a pack and layer", plain_s * 1e6 / layers / len(forward), "us", ""),
            ]
    return rows


PARTS = {"step_overhead": measure}

if __name__ == "__main__":
    run(PARTS)
