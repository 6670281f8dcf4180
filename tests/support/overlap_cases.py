"""Sums of gradients beside packs, as one rank of a `GlooPool` sees them."""

from typing import NamedTuple

import numpy as np
import torch

from dist_cases import RankUnderTest
from evenload.runtime.comm.mesh import create_meshes
from evenload.runtime.optim.data_parallel import GradientReduction
from evenload.runtime.step_source import prepare_step
from evenload.types.plan import decode_plan
from gloo_pool import TIMEOUT_S


class Told(NamedTuple):
    """Of one step on one rank.

    Args:
        units: told as complete, in order, each once.
        changed: of these, units that something was added to afterwards.
        equal: shards are the same to the bit, whether they were summed beside packs or after them.
        order: of the sums beside packs, by unit.
        early: of these, those that were on their way when the last pack was done.
    """

    units: tuple[int, ...]
    changed: tuple[int, ...]
    equal: bool
    order: tuple[int, ...]
    early: int


def run_told(plans: list[bytes], batch: dict, kind: str, changes: dict) -> list[Told]:
    """Each plan twice: sums after its packs, while gradients that are told complete are kept; and beside them."""
    found = []
    for encoded in plans:
        plan = decode_plan(encoded)
        mesh = create_meshes([plan.layout], torch.device("cpu"), timeout_s=TIMEOUT_S).start
        rank = RankUnderTest(mesh, kind, changes, torch.float64)
        tokens = {doc_id: ids.numpy().astype(np.int32) for doc_id, ids in batch.items()}
        step = prepare_step(plan, tokens, mesh)
        told: dict[int, list[torch.Tensor]] = {}

        def keep(unit: int, rank=rank, told=told) -> None:
            told.setdefault(unit, [buffer.grads.clone() for buffer in rank.buffers if buffer.unit == unit])

        with GradientReduction(rank.buffers, mesh) as after:
            rank.run_prepared(step, keep)
            changed = tuple(
                unit
                for unit, kept in told.items()
                for buffer, then in zip([b for b in rank.buffers if b.unit == unit], kept, strict=True)
                if not torch.equal(buffer.grads, then)
            )
            expected = [shard.clone() for shard in after.finish()]
        with GradientReduction(rank.buffers, mesh, is_overlapped=True) as beside:
            rank.run_prepared(step, beside.release)
            early = len(beside._queued)
            shards = beside.finish()
        found.append(
            Told(
                units=tuple(told),
                changed=changed,
                equal=all(torch.equal(one, other) for one, other in zip(shards, expected, strict=True)),
                order=tuple(beside.trace().unit.tolist()),
                early=early,
            )
        )
    return found
