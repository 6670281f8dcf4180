"""Which packs of the grid a profile times: as many as its minutes allow, the cheapest first."""

import time

import numpy as np
import torch.distributed as dist

from evenload.calibrate.pack_clock import PackClock
from evenload.calibrate.rounds import GRID, NEEDED_ROUNDS, Packs, longest_of, num_tokens_of, round_flops, time_round
from evenload.cost.activation import activation_bytes_per_token, kv_bytes_per_token
from evenload.runtime.comm.mesh import Mesh, most_of_ranks
from evenload.runtime.replay.stage import PipelineStage
from evenload.types.model import ModelSpec

# Of the budget that one pass may take, so that there are several to take medians of.
_PASS_SHARE = 0.12
# Of the memory that is free, for what layers keep; the rest is for tensors inside a layer.
_MEMORY_SHARE = 0.4


def choose_rounds(
    stage: PipelineStage, model: ModelSpec, mesh: Mesh, longest: int, budget_s: float, free_bytes: int
) -> list[int]:
    """Indices into `GRID`, ascending. Times each once, which warms caches and allocators up. Collective.

    Args:
        longest: no longer documents are tried, but where a coefficient needs them.
        budget_s: of the whole profile.
        free_bytes: of the device, beside weights.
    """
    order = sorted(
        range(len(GRID)), key=lambda index: (GRID[index] not in NEEDED_ROUNDS, round_flops(GRID[index], model))
    )
    chosen: list[int] = []
    spent_s, last_s, last_flops = 0.0, 0.0, 1.0
    for index in order:
        packs, flops = GRID[index], round_flops(GRID[index], model)
        if packs not in NEEDED_ROUNDS:
            if longest_of(packs) > longest or kept_bytes(packs, stage, model, mesh) > _MEMORY_SHARE * free_bytes:
                continue
            if spent_s + last_s * flops / last_flops > _PASS_SHARE * budget_s:
                break
        dist.barrier(group=mesh.control)
        start_s = time.perf_counter()
        for _ in time_round(stage, packs, PackClock(stage.device)):
            pass
        # All ranks decide alike, by the slowest.
        last_s, last_flops = most_of_ranks(time.perf_counter() - start_s, mesh), flops
        spent_s += last_s
        chosen.append(index)
    return sorted(chosen)


def kept_bytes(packs: Packs, stage: PipelineStage, model: ModelSpec, mesh: Mesh) -> float:
    """What layers keep and make for a round."""
    tp = mesh.layout.tp
    token_bytes = activation_bytes_per_token(model, "replay", tp) + kv_bytes_per_token(model, tp)
    # Of one layer as much again, for what its backward makes.
    return sum(num_tokens_of(packs).values()) * token_bytes * (len(stage.model.layers) + 1)


def windows_of(stage: PipelineStage, model: ModelSpec) -> tuple[int, ...]:
    """Of the layers that are timed, by `model` of exactly these layers."""
    return tuple(np.array(model.windows)[list(stage.model.layers)].tolist())
