"""Calibration: what the fit recovers, what it notices of a busy machine, and where its results are kept."""

from unittest import mock

import msgspec
import numpy as np
import pytest
import torch

from cost_samples import sample_coefficients, sample_model
from evenload.attention.cpu_flash import CpuFlashAttention
from evenload.calibrate.calibrate import _ROUNDS, _features, _fit_relative, calibrate
from evenload.calibrate.cost_cache import cached_path, read_cached, write_cached
from evenload.calibrate.link_timings import time_reduction
from evenload.runtime.comm.mesh import create_mesh
from evenload.runtime.model.hf_model import build_stage_model
from evenload.runtime.optim.parameter_units import flatten_units
from evenload.runtime.replay.stage import PipelineStage
from evenload.types.hf_config import model_from_hf_config
from evenload.types.layout import even_layout
from gloo_pool import TIMEOUT_S
from reference_training import tiny_config


def tiny_stage(window=None):
    config = tiny_config("mistral", sliding_window=window)
    model = build_stage_model(
        config, layers=(0, 4), dtype=torch.float32, device=torch.device("cpu"), weights=None, seed=0
    )
    flatten_units(model, dp=1)
    return PipelineStage(model, CpuFlashAttention()), model_from_hf_config(config.to_dict(), "tiny", 4)


def test_the_rounds_determine_all_coefficients():
    """Seconds made from known coefficients come back: the rounds vary every feature independently."""
    stage, model = tiny_stage()
    truth = np.array([3e-6, 2e-5, 4e-4, 5e-9, 7e-8])
    features = []
    for documents in _ROUNDS:
        for start, stop in zip(documents[0][:-1], documents[0][1:], strict=True):
            ranges = tuple((doc, start, stop) for doc in range(len(documents)))
            features.append(_features(ranges, stage, model))
    seconds = (np.array(features) @ truth).tolist()
    assert _fit_relative(features, seconds) == pytest.approx(truth, rel=1e-6)


def test_features_respect_sliding_windows():
    stage, model = tiny_stage(window=4)
    # rows 6..9 of one document see 4 keys each; its prefix within the window is 4
    assert _features(((0, 6, 10),), stage, model) == (4.0, 1.0, 1.0, 16.0, 4.0)


def _calibrated_on_a_rank():
    stage, model = tiny_stage()
    layout = even_layout(4)
    mesh = create_mesh(layout, torch.device("cpu"), TIMEOUT_S)
    with mock.patch("evenload.calibrate.calibrate._MAX_ATTEMPTS", 1):  # other tests disturb every attempt
        return msgspec.json.encode(calibrate({mesh.pp_rank: stage}, model, mesh, 256, "this machine").coefficients)


def test_calibration_measures_a_real_stage(gloo_pool):
    """Every time is positive somewhere, backward costs more than forward, and all is finite (the struct checks)."""
    from evenload.cost.coefficients import CostCoefficients

    (data,) = gloo_pool.run(1, _calibrated_on_a_rank)
    costs = msgspec.json.decode(data, type=CostCoefficients)
    assert costs.source == "calibrated"
    assert costs.device == "this machine"
    times = [
        p.linear_s_per_token * 256 + p.attention_s_per_pair * 256 * 257 / 2 + p.slice_s + p.pack_s
        for p in (costs.forward, costs.backward)
    ]
    assert 0 < times[0] < times[1]
    assert costs.head_s_per_token > 0
    assert costs.peak_flops_per_s > 1e8
    assert costs.optimizer_s_per_parameter > 0
    assert costs.context_hidden_share == 0


def _reduction_of_a_rank(sizes):
    return time_reduction(create_mesh(even_layout(4, **sizes), torch.device("cpu"), TIMEOUT_S))


def test_reductions_are_timed_over_the_ranks_that_sum_gradients(gloo_pool):
    """Not over one hop to a neighbour, which is several times faster than gloo's rings."""
    for sizes in ({"dp": 2}, {"dp": 3}, {"cp": 2}):
        found = gloo_pool.run(np.prod([*sizes.values()]).item(), _reduction_of_a_rank, sizes)
        assert all(bandwidth > 1e6 and latency_s > 0 for bandwidth, latency_s in found)
    assert gloo_pool.run(2, _reduction_of_a_rank, {"pp": 2}) == [None, None]


def test_cached_costs_are_found_again_only_for_the_same_device_and_layout(tmp_path):
    costs, model, layout = sample_coefficients(), sample_model(), even_layout(3)
    path = cached_path(tmp_path, model, layout, "cpu a", 1, "auto")
    assert read_cached(path) is None
    write_cached(path, costs)
    assert read_cached(path) == costs
    for other in (
        cached_path(tmp_path, model, layout, "cpu b", 1, "auto"),
        cached_path(tmp_path, model, layout, "cpu a", 2, "auto"),
        cached_path(tmp_path, model, even_layout(3, pp=3), "cpu a", 1, "auto"),
    ):
        assert read_cached(other) is None
