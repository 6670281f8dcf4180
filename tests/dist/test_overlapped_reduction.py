"""Gradients summed beside packs: only what is complete, in one order, equal to the bit."""

import math
from contextlib import closing
from typing import NamedTuple

import msgspec
import numpy as np
import pytest
import torch

from context_plans import phased_plan
from dist_cases import RankUnderTest
from dist_equality import assert_plans_equal_plain
from dist_training import STEEP_COSTS, make_trainer
from evenload.cost.coefficients import OverlapCost
from evenload.runtime.comm.mesh import create_meshes
from evenload.runtime.optim.data_parallel import GradientReduction
from evenload.runtime.step_source import prepare_step
from evenload.stepplan.validate import validate_plan
from evenload.types.plan import decode_plan, encode_plan
from gloo_pool import TIMEOUT_S
from matrix import Row
from matrix_plans import case_of, plan_of
from plan_building import random_plan
from reference_training import make_tokens
from sweeps import sweep
from training_cases import write_training_config


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
    "shared documents in a pipeline": ROW._replace(
        layout="pp2 dp2", dp_merge="on", sharding="per_document", exchange="all_gather"
    ),
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


@pytest.mark.parametrize(
    ("dp", "pp", "virtual", "split"), [(4, 1, 1, False), (4, 1, 1, True), (2, 2, 1, False), (2, 2, 2, False)]
)
def test_groups_of_several_sizes_sum_beside_what_replicas_run_alone(gloo_pool, dp, pp, virtual, split):
    """Replicas leave their groups at different times, with different packs of their own; gradients are complete in
    other packs on each. Equal to sums after all packs to the bit, and to plain training."""
    shape = {"dp": dp, "pp": pp, "virtual": virtual, "split": split, "num_layers": 4}
    plans = [phased_plan(seed, **shape, own=1 - 0.5 * (seed % 2)) for seed in sweep(range(20, 28), 3)]
    sizes = {pack.slices[0].cp for plan in plans for packs in plan.pack_plans for pack in packs.backward}
    assert len(sizes) > 1 + (dp > 2)
    for plan in plans:
        batch = make_tokens([document.num_tokens for document in plan.documents], 64, seed=1)
        encoded = [encode_plan(plan)]
        ranks = gloo_pool.run(pp * dp, run_with_output, encoded, batch, "llama", {"num_hidden_layers": 4})
        orders = [ranks[rank][0].order for rank in range(pp * dp)]
        assert all(len(set(orders[stage * dp : (stage + 1) * dp])) == 1 for stage in range(pp))
        for (reported,) in ranks:
            assert reported.changed == ()
            assert reported.equal
            assert reported.early == len(reported.order) > 0
    channels = "directed" if virtual == 1 else "fifo"
    assert_plans_equal_plain(gloo_pool, plans, changes={"num_hidden_layers": 4}, channels=channels)


@pytest.mark.parametrize("blocks", [[(0, 3)], [(0, 2), (2, 1)]], ids=str)
def test_groups_that_do_not_divide_the_replicas_equal_plain_training(gloo_pool, blocks):
    """Three of four replicas, two of three; the other one never meets them but in sums."""
    dp = 1 + blocks[0][1]
    plans = [phased_plan(seed, dp=dp, pp=1, num_layers=2, blocks=blocks, own=0.5) for seed in sweep(range(4), 2)]
    for plan in plans:
        validate_plan(plan)
        assert {s.cp for packs in plan.pack_plans for pack in packs.forward for s in pack.slices} >= {blocks[0][1]}
    assert_plans_equal_plain(gloo_pool, plans, changes={"num_hidden_layers": 2})


class Trained(NamedTuple):
    """Of a run on one rank: what it ended with as bits, and of every step, on rank 0, whether replicas shared
    documents, and seconds of sums that packs hid, measured and predicted."""

    state: bytes
    told: list[tuple[bool, float, float]]


def train_and_tell(config_file: str, overrides: list[str], is_on: bool) -> Trained:
    trainer, told = make_trainer(config_file, overrides), []
    costs = msgspec.structs.replace(STEEP_COSTS, overlap=OverlapCost(), overlap_reduction=is_on)
    for report in trainer.train(costs, 2**34):
        if report is not None:
            pieces = (piece for packs in report.plan.pack_plans for pack in packs.backward for piece in pack.slices)
            hidden_s = report.row["reduction_hidden_s"], report.row["predicted_reduction_hidden_s"]
            told.append((any(piece.cp > 1 for piece in pieces), *map(float, hidden_s)))  # type: ignore[arg-type]
    state = b"".join(buffer.values.view(torch.uint8).numpy().tobytes() for buffer in trainer.state.buffers)
    return Trained(state, told)


@pytest.mark.parametrize("sizes", [{"dp": 2}, {"dp": 2, "pp": 2}], ids=str)
def test_steps_that_share_documents_train_the_same_with_sums_beside_packs(gloo_pool, tmp_path, sizes):
    """From the configuration to the row that a step writes."""
    texts = [*(["x" * 20] * 11), "y" * 150] * 2
    config_file = write_training_config(tmp_path, texts, num_layers=4)
    fixed = [f"parallel.{name}={size}" for name, size in sizes.items()]
    fixed += ["plan.strategy=slimpack", "plan.options.dp_merge=true", "data.batch_documents=12", "model.dtype=float64"]
    fixed += ["data.max_document_tokens=256", "plan.options.max_pack_tokens=256", "train.steps=2"]
    result = {}
    for is_on in (False, True):
        here = [*fixed, f"train.overlap_reduction={str(is_on).lower()}", f"train.output_dir={tmp_path}/{is_on}"]
        result[is_on] = gloo_pool.run(math.prod(sizes.values()), train_and_tell, str(config_file), here, is_on)
    assert [one.state for one in result[True]] == [one.state for one in result[False]]
    assert all(predicted_s == 0 for _, _, predicted_s in result[False][0].told)
    assert all(
        is_shared and hidden_s > 0 and predicted_s > 0 for is_shared, hidden_s, predicted_s in result[True][0].told
    )
