"""Gradients summed beside packs: only what is complete, in one order, equal to the bit."""

from contextlib import closing
from typing import NamedTuple

import numpy as np
import pytest
import torch

from dist_cases import RankUnderTest
from evenload.runtime.comm.mesh import create_meshes
from evenload.runtime.optim.data_parallel import GradientReduction
from evenload.runtime.step_source import prepare_step
from evenload.types.plan import decode_plan, encode_plan
from gloo_pool import TIMEOUT_S
from matrix import Row
from matrix_plans import case_of, plan_of
from plan_building import random_plan
from reference_training import make_tokens
from sweeps import sweep


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


def run_with_output(plans: list[bytes], batch: dict, kind: str, changes: dict) -> list[Told]:
    """Each plan twice: sums after its packs, while gradients that are told complete are kept; and beside them."""
    result = []
    for encoded in plans:
        plan = decode_plan(encoded)
        meshes = create_meshes([plan.layout], torch.device("cpu"), timeout_s=TIMEOUT_S)
        mesh, rank = meshes.start, RankUnderTest(meshes, plan.layout, kind, changes, torch.float64)
        tokens = {doc_id: ids.numpy().astype(np.int32) for doc_id, ids in batch.items()}
        step = prepare_step(plan, tokens, mesh)
        reported: dict[int, list[torch.Tensor]] = {}

        def keep(unit: int, rank=rank, reported=reported) -> None:
            reported.setdefault(unit, [buffer.grads.clone() for buffer in rank.buffers if buffer.unit == unit])

        with closing(GradientReduction(rank.buffers, mesh)) as after:
            rank.run_prepared(step, keep)
            changed = tuple(
                unit
                for unit, kept in reported.items()
                for buffer, then in zip([b for b in rank.buffers if b.unit == unit], kept, strict=True)
                if not torch.equal(buffer.grads, then)
            )
            expected = [shard.clone() for shard in after.finish()]
        with closing(GradientReduction(rank.buffers, mesh, is_overlapped=True)) as beside:
            rank.run_prepared(step, beside.release)
            early = len(beside._queued)
            shards = beside.finish()
        result.append(
            Told(
                units=tuple(reported),
                changed=changed,
                equal=all(torch.equal(one, other) for one, other in zip(shards, expected, strict=True)),
                order=tuple(beside._queued),
                early=early,
            )
        )
    return result


ROW = Row("slimpack", "dp2", "1", "off", "replay", "own", "qwen2, tied", "none", "none", "directed", "on", "off")
ROWS = {
    "one stage": ROW,
    "shared documents": ROW._replace(dp_merge="on", sharding="per_document", exchange="all_gather"),
    "context ranks": ROW._replace(layout="cp2", sharding="per_sequence", exchange="all_gather"),
    "stages, tied ends": ROW._replace(layout="pp2 dp2"),
    "virtual stages": ROW._replace(layout="pp2 dp2", virtual="2"),
    "split backward": ROW._replace(layout="pp2 dp2", schedule="zb_h1", strategy="balanced"),
    "virtual stages, split backward": ROW._replace(layout="pp2 dp2", virtual="2", schedule="list_split"),
    "tensor ranks": ROW._replace(layout="dp2 tp2"),
}


@pytest.mark.parametrize("name", ROWS)
def test_what_is_summed_early_is_complete_and_equal_to_the_bit(gloo_pool, name):
    row = ROWS[name]
    plan, case = plan_of(row), case_of(row)
    arguments = [encode_plan(plan)], case.batch(), case.kind, case.changes
    ranks = gloo_pool.run(plan.layout.world_size, run_with_output, *arguments)
    for (reported,) in ranks:
        assert reported.changed == ()
        assert reported.equal
        assert list(reported.order) == sorted(reported.order, reverse=True), "from the head to the embedding"
        assert set(reported.order) <= set(reported.units)
        assert reported.early == len(reported.order) > 0, "nothing waits for the end of the step"


@pytest.mark.parametrize(("pp", "dp", "count"), [(1, 3, 8), (2, 2, 8)])
def test_replicas_may_do_what_they_like(gloo_pool, pp, dp, count):
    """Any cuts and orders, replicas with many packs, few or none: sums meet, nothing waits for ever."""
    plans = [random_plan(7000 * pp + 100 * dp + i, num_layers=4, pp=pp, dp=dp) for i in sweep(range(count), count // 4)]
    for plan in plans:
        batch = make_tokens([document.num_tokens for document in plan.documents], 64, seed=1)
        batch = dict(zip((document.doc_id for document in plan.documents), batch.values(), strict=True))
        ranks = gloo_pool.run(pp * dp, run_with_output, [encode_plan(plan)], batch, "llama", {"num_hidden_layers": 4})
        orders = [ranks[rank][0].order for rank in range(pp * dp)]
        for (reported,) in ranks:
            assert reported.changed == ()
            assert reported.equal
        assert all(len(set(orders[stage * dp : (stage + 1) * dp])) == 1 for stage in range(pp))
