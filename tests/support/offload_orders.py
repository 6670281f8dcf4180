"""What pipeline ranks offload and free in a step of a real plan, in its order; no memory is touched."""

from collections import Counter
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from evenload.cost.analytic import analytic_coefficients
from evenload.cost.layer_counts import local_kv_heads
from evenload.data.lengths import read_lengths
from evenload.explore.batches import BatchRule
from evenload.plan.planner import StepPlanner
from evenload.plan.problem import PlanOptions
from evenload.runtime.comm.tensor_group import RowShard
from evenload.runtime.replay.host_copies import HostArena
from evenload.runtime.replay.rank_packs import pack_ranges
from evenload.runtime.replay.store import BlockIndex
from evenload.types.cluster import cluster_from
from evenload.types.layout import even_layout
from evenload.types.model import ModelSpec
from evenload.types.plan import StepPlan

TABLES = Path(__file__).parents[2] / "examples" / "lengths"
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


def new_segment(num_bytes: int) -> torch.Tensor:
    """Addresses without memory."""
    return torch.empty(num_bytes, dtype=torch.uint8, device="meta")


def follow(order: list[Taken], memory: HostArena) -> int:
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
