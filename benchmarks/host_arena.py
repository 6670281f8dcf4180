"""What host memory holds beyond the activations that a plan offloads: the runtime's arena, the same without cutting
tensors, and torch's pinned allocator, which rounds up to powers of two.

Plans of llama-70b and llama-150b, tp 8, everything offloaded, of every table of `examples/lengths` cut off at 64K and
256K tokens. Actions of a plan are followed in its order, and tensors taken as `ActivationStore` takes them: by layer
and block of slices, nine a layer. Two steps follow each other in the same memory. The fullest pipeline rank of the
first replica is shown: what it holds at the end, over the most that its tensors ever took at once. No memory is
touched.

    python benchmarks/host_arena.py [--quick] [--append]
"""

from collections import Counter
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from evenload.cost.activation import activation_bytes_per_token, local_kv_heads
from evenload.cost.analytic import analytic_coefficients
from evenload.data.lengths import read_lengths
from evenload.explore.batches import BatchRule
from evenload.plan.planner import StepPlanner
from evenload.plan.problem.options import PlanOptions
from evenload.runtime.comm.tensor_group import RowShard
from evenload.runtime.replay.blocks import BlockIndex
from evenload.runtime.replay.host_arena import HostArena
from evenload.runtime.replay.rank_packs import pack_ranges
from evenload.types.cluster_catalog import cluster_from
from evenload.types.layout import even_layout
from evenload.types.model import ModelSpec
from evenload.types.model_catalog import MODELS
from evenload.types.plan import StepPlan
from results import Row, run_benchmark

TABLES = Path(__file__).parent.parent / "examples" / "lengths"
CONTEXTS = (65_536, 262_144)
SETTINGS = (("llama-70b", {"dp": 4, "pp": 4, "tp": 8}), ("llama-150b", {"dp": 4, "pp": 2, "tp": 8, "virtual": 2}))
STRATEGIES = ("slimpack", "auto")
DOCUMENTS, STEPS = 256, 2


class Taken(NamedTuple):
    """A tensor goes to host memory, or all of a name's tensors are freed (`shape` is None)."""

    name: Hashable
    shape: torch.Size | None
    dtype: torch.dtype


def layer_tensors(model: ModelSpec, tp: int) -> list[tuple[int, torch.dtype, bool]]:
    """Width, type and whether it has own rows only, of what a token leaves on a layer, in the order of recording."""
    head, kept = model.head_dim, torch.bfloat16
    query, key = model.num_heads // tp * head, local_kv_heads(model, tp) * head
    ffn = model.ffn_hidden_size // tp
    whole = [(model.hidden_size, kept, True)]
    widths = [
        *((width, kept, False) for width in (query, key, key, query)),
        (model.num_heads // tp, torch.float32, False),
    ]
    return [*whole, *widths, *whole, *[(ffn, kept, False)] * 2]


def offload_order(plan: StepPlan, model: ModelSpec, dp_rank: int, pp_rank: int) -> Iterator[Taken]:
    """What a rank takes and frees in a step of which everything is offloaded."""
    layout, packs = plan.layout, plan.pack_plans[dp_rank]
    shard = RowShard(0, layout.tp)
    indices: dict[int, BlockIndex] = {}
    for action in plan.schedules[dp_rank].ranks[pp_rank]:
        if action.stage not in indices:
            backward = [pack_ranges(pack) for pack in packs.backward]
            indices[action.stage] = BlockIndex(backward, lambda doc_id: "offload", shard)
        index = indices[action.stage]
        if action.kind == "F":
            blocks = index.open_pack(pack_ranges(packs.forward[action.pack]))
            for _ in range(layout.stage_counts[action.stage]):
                for block in blocks:
                    for width, dtype, is_own in layer_tensors(model, layout.tp):
                        rows = block.own_rows if is_own else block.rows
                        yield Taken(id(block), torch.Size((rows.stop - rows.start, width)), dtype)
        elif action.kind in "BI":
            for block in index.close(pack_ranges(packs.backward[action.pack])):
                yield Taken(id(block), None, torch.uint8)


class _Rounded:
    """torch's pinned allocator: powers of two, each of which stays of its size."""

    def __init__(self) -> None:
        self._free: Counter[int] = Counter()
        self.held_bytes = 0

    def take(self, shape: torch.Size, dtype: torch.dtype) -> int:
        num_bytes = shape.numel() * dtype.itemsize
        size = 1 << (num_bytes - 1).bit_length() if num_bytes else 0
        if self._free[size]:
            self._free[size] -= 1
        else:
            self.held_bytes += size
        return size

    def free(self, size: int) -> None:
        self._free[size] += 1


def new_segment(num_bytes: int) -> torch.Tensor:
    """Addresses without memory."""
    return torch.empty(num_bytes, dtype=torch.uint8, device="meta")


def follow(order: list[Taken], memory: HostArena | _Rounded) -> int:
    """Take and free in this order; the most bytes that tensors took at once, before any rounding."""
    live: dict[Hashable, list] = {}
    live_bytes: Counter[Hashable] = Counter()
    total = peak = 0
    for name, shape, dtype in order:
        if shape is None:
            for rows in live.pop(name):
                memory.free(rows)
            total -= live_bytes.pop(name)
            continue
        live.setdefault(name, []).append(memory.take(shape, dtype))
        live_bytes[name] += shape.numel() * dtype.itemsize
        total += shape.numel() * dtype.itemsize
        peak = max(peak, total)
    assert not live
    assert not total
    return peak


def plans_of(
    model: ModelSpec, sizes: dict[str, int], table: str, context: int, strategy: str, steps: int = STEPS
) -> list[StepPlan]:
    """Of steps of which everything is offloaded."""
    layout = even_layout(model.num_layers, **sizes)
    costs = analytic_coefficients(model, cluster_from(f"h100x{layout.world_size}"), layout)
    planner = StepPlanner(
        model,
        costs,
        layout,
        None,
        PlanOptions(max_pack_tokens=context, policy="offload", dp_merge=False),
        host="unlimited",
    )
    batches = BatchRule(num_documents=DOCUMENTS, context=context, overlong="truncate").sample(
        read_lengths(str(TABLES / f"{table}.npy.gz")), steps=steps, seed=0
    )
    return [planner.propose(step, batch.documents, strategy).plan for step, batch in enumerate(batches)]


def measure(quick: bool) -> list[Row]:
    """Every model, table, context and strategy."""
    rows: list[Row] = []
    for model_name, sizes in SETTINGS[: 1 if quick else None]:
        model = MODELS[model_name]
        per_token = sum(
            width * dtype.itemsize // (sizes["tp"] if is_own else 1)
            for width, dtype, is_own in layer_tensors(model, sizes["tp"])
        )
        assert per_token == activation_bytes_per_token(model, "replay", sizes["tp"])
        for file in sorted(TABLES.glob("*.npy.gz"))[: 1 if quick else None]:
            table = file.name.removesuffix(".npy.gz")
            for context in CONTEXTS[: 1 if quick else None]:
                for strategy in STRATEGIES:
                    plans = plans_of(model, sizes, table, context, strategy)
                    rows += compare(plans, model, f"{model_name}, {table}, {context // 1024}K, {strategy}")
    return rows


def compare(plans: list[StepPlan], model: ModelSpec, case: str) -> list[Row]:
    """Rows of the pipeline rank that takes most."""
    found = []
    for pp_rank in range(plans[0].layout.pp):
        orders = [list(offload_order(plan, model, 0, pp_rank)) for plan in plans]
        memories = {
            "arena": HostArena(new_segment),
            "best fit without cuts": HostArena(new_segment, smallest_piece_bytes=2**60),
            "powers of two": _Rounded(),
        }
        peaks = [max(follow(order, memory) for order in orders) for memory in memories.values()]
        found.append((peaks[0], {name: memory.held_bytes for name, memory in memories.items()}))
    peak, held = max(found, key=lambda one: one[0])
    return [
        Row(
            "host_arena",
            case,
            f"host memory held, {name}",
            num_bytes / peak,
            "x",
            f"peak of tensors, {peak / 2**30:.1f} GiB",
        )
        for name, num_bytes in held.items()
    ]


if __name__ == "__main__":
    run_benchmark(measure, __doc__)
