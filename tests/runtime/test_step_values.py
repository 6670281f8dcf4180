"""What is told of a step, by numbers: four ranks' traces as one timeline, what ranks say, the row's seconds."""

import dataclasses

import msgspec
import numpy as np
import pytest
import torch

from cost_samples import sample_coefficients, sample_model
from evenload.cost.layer_counts import training_flops
from evenload.planning.planner import StepPlanner
from evenload.runtime.comm.mesh import create_meshes
from evenload.runtime.executor import RankTrace
from evenload.runtime.optim.data_parallel import GatherTrace
from evenload.runtime.step_metrics import RankStepReport, gather_timeline, step_row
from evenload.types.columns import causal_pairs
from evenload.types.document import Document
from evenload.types.layout import even_layout
from evenload.types.timeline import KINDS, SIDE_KINDS
from evenload.types.tree import Segment
from gloo_pool import TIMEOUT_S

LAYOUT = even_layout(4, dp=2, pp=2)
ZERO_S = (100.0, 2000.0, -30.0, 7.5)
"""Clocks of the ranks at the step's start: nothing may depend on them."""
# Of (replica, stage), seconds from the step's start: packs end, two sums each begin and end, a gather, a wait for it.
PACKS = {(0, 0): (1.0, 6.0), (1, 0): (0.5, 5.0), (0, 1): (2.0, 4.0), (1, 1): (2.5, 4.5)}
SUMS = {
    (0, 0): ((4.0, 6.5), (5.0, 8.0)),
    (1, 0): ((3.5, 6.25), (5.5, 7.5)),
    (0, 1): ((3.0, 3.5), (3.5, 5.0)),
    (1, 1): ((3.25, 4.0), (3.75, 5.25)),
}
GATHERS = {(0, 0): (-0.5, 0.75), (1, 0): (-0.25, 0.5), (0, 1): (-1.0, 0.25), (1, 1): (-1.0, 0.125)}
END = RankStepReport(
    step_time_s=4.0, peak_bytes=100, data_wait_s=0.0, barrier_s=0.5, stop_signal=15, is_time_to_save=False
)
"""What four ranks report together."""


def _gathered(traces):
    mesh = create_meshes([LAYOUT], torch.device("cpu"), TIMEOUT_S).start
    place, zero_s = (mesh.dp_rank, mesh.pp_rank), ZERO_S[mesh.rank]
    packs, sums, gather = (np.array(one[place]) + zero_s for one in traces)
    trace = RankTrace(
        kind=np.array([KINDS.index("F")], np.uint8),
        stage=np.array([place[1]], np.int32),
        pack=np.zeros(1, np.int32),
        start_s=packs[:1],
        end_s=packs[1:],
        memory_bytes=np.array([10 * place[0] + place[1]]),
        memory_kind_bytes=np.zeros((1, 1), np.int64),
    )
    result = gather_timeline(
        trace,
        sums.T,
        [GatherTrace(gather[:, None], np.zeros((2, 0)))],
        zero_s=zero_s,
        step_time_s=9.0,
        static_bytes=1000,
        mesh=mesh,
    )
    own = dataclasses.replace(
        END,
        step_time_s=1.0 + mesh.rank,
        peak_bytes=100 - mesh.rank,
        barrier_s=0.5 * (4 - mesh.rank),
        stop_signal=15 * (mesh.rank == 2),
    )
    return result, own.joined(mesh)


def test_traces_of_four_ranks_by_hand(gloo_pool):
    results = gloo_pool.run(4, _gathered, (PACKS, SUMS, GATHERS))
    timeline = results[0][0]
    assert timeline is not None
    assert all(result is None for result, _ in results[1:])
    assert timeline.step_time_s == 9.0
    of_rank = dict(zip(zip(timeline.dp_rank, timeline.rank, strict=True), range(4), strict=True))
    for place, (start_s, end_s) in PACKS.items():
        assert (timeline.start_s[of_rank[place]], timeline.end_s[of_rank[place]]) == (start_s, end_s)
        assert timeline.memory_bytes[of_rank[place]] == 1000 + 10 * place[0] + place[1]
    side = timeline.side
    assert side is not None
    # A sum begins when the last of both replicas has come and the sum before it is done, and ends with the last.
    expected = {
        ("reduction", 0): [(4.0, 6.5), (6.5, 8.0)],
        ("reduction", 1): [(3.25, 4.0), (4.0, 5.25)],
        ("gather", 0): [(-0.25, 0.75)],
        ("gather", 1): [(-1.0, 0.25)],
    }
    for (kind, rank), spans in expected.items():
        for replica in (0, 1):
            own = (side.kind == SIDE_KINDS.index(kind)) & (side.rank == rank) & (side.dp_rank == replica)
            assert list(zip(side.start_s[own], side.end_s[own], strict=True)) == spans, (kind, rank, replica)
    # Hidden until the last replica's packs of the stage end, at 6.0 and 4.5.
    assert timeline.reduction_seconds() == ((4.0 + 2.0) / 2, (2.0 + 1.25) / 2)


def test_ranks_say_together_the_most_and_the_barrier_of_who_came_last(gloo_pool):
    assert [end for _, end in gloo_pool.run(4, _gathered, (PACKS, SUMS, GATHERS))] == [END] * 4


def test_a_step_takes_what_ranks_tell_each_other_too(gloo_pool):
    """MFU and tokens a second are against the whole step; the prediction is not."""
    timeline = gloo_pool.run(4, _gathered, (PACKS, SUMS, GATHERS))[0][0]
    model = sample_model(num_layers=4)
    documents = tuple(Document(doc_id=i, num_tokens=n, num_label_tokens=n - 1) for i, n in enumerate((50, 30)))
    plan = StepPlanner(model, sample_coefficients(), LAYOUT, 1 << 40, host="unlimited").plan(0, documents, "balanced")

    def row(exchange_s, plan=plan):
        return step_row(
            plan,
            timeline,
            model,
            loss=1.0,
            grad_norm=1.0,
            learning_rate=0.1,
            peaks=(1e6, 2e6),
            end=dataclasses.replace(END, data_wait_s=2.0),
            exchange_s=exchange_s,
            plan_s=0.0,
        )

    alone, whole = row(0.0), row(1.0)
    assert (alone["step_time_s"], whole["step_time_s"], whole["exchange_s"]) == (9.0, 10.0, 1.0)
    assert (alone["tokens_per_s"], whole["tokens_per_s"]) == (80 / 11, 80 / 12)
    assert whole["mfu"] == pytest.approx(0.9 * alone["mfu"])
    assert whole["mfu_of_data_sheet"] == pytest.approx(whole["mfu"] / 2)
    assert whole["predicted_step_time_s"] == alone["predicted_step_time_s"] == plan.predicted.step_time_s
    assert (alone["path_tokens_per_s"], alone["tree_token_ratio"], alone["recomputed_tokens"]) == (80 / 11, 1.0, 0)
    tree = msgspec.structs.replace(documents[0], num_path_tokens=130, num_recomputed_tokens=7)
    trees = row(0.0, msgspec.structs.replace(plan, documents=(tree, documents[1])))
    assert trees["tokens_per_s"] == alone["tokens_per_s"]
    assert (trees["path_tokens_per_s"], trees["tree_token_ratio"], trees["recomputed_tokens"]) == (160 / 11, 2.0, 7)
    # Rows of branches see the keys of their paths, fewer than as many rows of one sequence: 10 + 10 + 30 tokens.
    branches = msgspec.structs.replace(tree, segments=(Segment(10, -1), Segment(10, 0), Segment(30, 0)))
    branched = row(0.0, msgspec.structs.replace(plan, documents=(branches, documents[1])))
    pairs = causal_pairs(np.array([0, 10, 10]), np.array([10, 20, 40])).sum() - causal_pairs(0, 50)
    per_pair = (training_flops(model, [50])[0] - 50 * training_flops(model, [1])[0]) / (causal_pairs(0, 50) - 50)
    assert branched["mfu"] == pytest.approx(trees["mfu"] + per_pair * pairs / 9.0 / 1e6)
    assert branched["mfu"] < trees["mfu"]
    cut_short = row(0.0, msgspec.structs.replace(plan, is_cut_short=True))
    assert (alone["plan_cut_short"], cut_short["plan_cut_short"]) == (0, 1)
