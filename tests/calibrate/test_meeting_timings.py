"""Packs that ranks share, timed with everybody: what is left beyond the price of rows and transfers."""

import dataclasses

import msgspec
import numpy as np
import pytest
import torch

from cost_samples import BACKWARD, FORWARD, sample_model
from evenload.attention.cpu_flash import CpuFlashAttention
from evenload.calibrate.assemble import RankMeasurement, coefficients_of
from evenload.calibrate.calibrate import calibrate
from evenload.calibrate.meeting_timings import SharedSample, shared_packs
from evenload.calibrate.rounds import QUICK_ROUNDS, Sample, pack_features
from evenload.cost.coefficients import CostCoefficients
from evenload.cost.measured_on import Disturbance
from evenload.cost.pack_cost import PackCosts
from evenload.cost.ranked_packs import rank_seconds
from evenload.runtime.comm.mesh import create_meshes
from evenload.runtime.model.hf_model import build_stage_model
from evenload.runtime.optim.parameter_units import flatten_units
from evenload.runtime.replay.stage import PipelineStage
from evenload.stepplan.rank_rows import shared_documents
from evenload.stepplan.ranked_packs import ranked_where_shared
from evenload.types.cluster import LinkSpec
from evenload.types.columns import SliceColumns
from evenload.types.hf_config import model_from_hf_config
from evenload.types.layout import even_layout
from evenload.types.token_range import Range
from gloo_pool import TIMEOUT_S
from quick_calibration import quick_calibration
from reference_training import tiny_config

TRUTH = {"forward": FORWARD, "backward": BACKWARD}
MEETINGS_S = {"forward": 250.0, "backward": 125.0}
LINK = LinkSpec(bandwidth_bytes_per_s=100.0, latency_s=3.0)


def compute_seconds(direction, ranges):
    truth = TRUTH[direction]
    rates = (truth.linear_s_per_token, truth.slice_s, truth.pack_s, 0.0, truth.attention_s_per_pair, 0.0)
    return float(np.dot(pack_features(ranges, (0,)), rates))


def quick_samples():
    return tuple(
        Sample(direction, ranges, compute_seconds(direction, ranges))
        for direction in TRUTH
        for round_packs in QUICK_ROUNDS
        for ranges in round_packs
    )


def measured(**more):
    return RankMeasurement(
        **{
            "disturbance": Disturbance(waited_share=0.0, spread=0.0),
            "head": ((1, 1.0), (2, 2.0)),
            "peak_flops_per_s": 1e9,
            "optimizer_s": 1e-9,
            "weight_s": 700.0,
            "copy_s_per_byte": 0.0,
            **more,
        }
    )


def test_meetings_take_what_shared_packs_take_beyond_their_price():
    """Samples that a plan's price makes under known meetings give these back."""
    model = sample_model(num_layers=1, num_heads=4, num_kv_heads=4)
    rows = shared_documents([256, 128], 2)
    alone = measured(packs=quick_samples(), links={"context": LINK}, copy_s_per_byte=0.01)
    layout = even_layout(1, cp=2)
    costs = coefficients_of([alone] * 2, model, "some CPU", layout)
    assert costs.forward.meeting_s is costs.backward.meeting_s is None, "nobody timed a shared pack"
    known = {
        way: msgspec.structs.replace(costs.of_pass(way), meeting_s=seconds)  # type: ignore[arg-type]
        for way, seconds in MEETINGS_S.items()
    }
    # As a plan prices them: layers alone, without embedding and head.
    of_plan = PackCosts(model, msgspec.structs.replace(costs, **known, head_s_per_token=0.0, head_pack_s=0.0), layout)
    columns = SliceColumns.from_ranges([[(0, 0, 256), (1, 0, 128)]], cp=2)
    ranked = dict(zip(TRUTH, ranked_where_shared(of_plan, columns, columns, ("per_document",)), strict=True))
    ranks = [
        dataclasses.replace(
            alone,
            shared=tuple(
                SharedSample(way, rows.ranges(rank), float(rank_seconds(of_plan, ranked[way], way)[rank, 0]), 384, 2)
                for way in TRUTH
            ),
        )
        for rank in (0, 1)
    ]
    found = coefficients_of(ranks, model, "some CPU", layout)
    for way, seconds in MEETINGS_S.items():
        assert found.of_pass(way).meeting_s == pytest.approx(seconds, rel=1e-4)  # type: ignore[arg-type]


def test_small_packs_tell_meetings_where_transfers_are_priced_too_dear():
    """Copies are free and a link has no latency, so a pack of 2 tokens is its rows and meetings. One of 256 tokens is
    told to have taken 500 s less than its price: in the mean of both, meetings of 100 s would come out below 0."""
    model = sample_model(num_layers=1, num_heads=4, num_kv_heads=4)
    alone = measured(packs=quick_samples(), links={"context": LinkSpec(bandwidth_bytes_per_s=1e9, latency_s=0.0)})
    layout = even_layout(1, cp=2)
    rows = {2: (Range(0, 0, 2),), 256: (Range(0, 0, 256),)}
    shared = tuple(
        SharedSample(way, own, compute_seconds(way, own) + more_s, 2 * tokens, 2)
        for way in TRUTH
        for (tokens, own), more_s in zip(rows.items(), (100.0, -500.0), strict=True)
    )
    found = coefficients_of([dataclasses.replace(alone, shared=shared)] * 2, model, "some CPU", layout)
    for way in TRUTH:
        small_s, large_s = (one.seconds for one in shared if one.direction == way)
        expected = (100.0 / small_s**2 - 500.0 / large_s**2) / (1 / small_s**2 + 1 / large_s**2)
        assert expected > 90
        assert found.of_pass(way).meeting_s == pytest.approx(expected, rel=1e-4)  # type: ignore[arg-type]


def test_documents_of_shared_packs_are_no_longer_than_those_of_the_run():
    assert max(map(max, shared_packs(4096, 2))) == 512
    assert max(map(max, shared_packs(600, 2))) == 256
    assert shared_packs(64, 8) == ((8,),)


def test_rows_of_a_shared_pack():
    rows = shared_documents([64, 8], 2)
    assert rows.ranges(0) == (Range(0, 0, 16), Range(0, 48, 64), Range(1, 0, 2), Range(1, 6, 8))
    assert rows.ranges(1) == (Range(0, 16, 48), Range(1, 2, 6))


def _calibrated(sizes):
    config = tiny_config("mistral")
    layout = even_layout(4, **sizes)
    model = build_stage_model(
        config, layers=(0, 4), dtype=torch.float32, device=torch.device("cpu"), weights=None, seed=0
    )
    flatten_units(model, dp=layout.dp * layout.cp)
    stage = PipelineStage(model, CpuFlashAttention())
    mesh = create_meshes([layout], torch.device("cpu"), TIMEOUT_S).start
    spec = model_from_hf_config(config.to_dict(), "tiny", 4)
    with quick_calibration():
        return msgspec.json.encode(calibrate({mesh.pp_rank: stage}, spec, mesh, 256, "this machine").coefficients)


@pytest.mark.parametrize("sizes", [{"cp": 2}, {"dp": 2}], ids=str)
def test_ranks_that_may_share_packs_time_their_meetings(gloo_pool, sizes):
    """All ranks have the same number, in both directions."""
    first, second = gloo_pool.run(2, _calibrated, sizes)
    assert first == second
    costs = msgspec.json.decode(first, type=CostCoefficients)
    for found in (costs.forward, costs.backward):
        assert found.meeting_s is not None
        assert found.meeting_s >= 0
