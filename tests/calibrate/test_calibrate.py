"""Calibration at the start of a run: of a real stage, of links between ranks, and where its results are kept."""

from types import SimpleNamespace

import msgspec
import pytest
import torch

from cost_samples import sample_coefficients, sample_model
from evenload.calibrate.calibrate import cached_path, calibrate, read_cached, write_cached
from evenload.calibrate.kernels import weight_seconds
from evenload.calibrate.links import overlap_cost
from evenload.calibrate.rounds import PackClock, num_tokens_of, pack_clock, time_round, whole
from evenload.config.sections import LoraConfig
from evenload.cost.coefficients import CostCoefficients
from evenload.data.hub import model_from_config
from evenload.runtime.comm.mesh import create_meshes
from evenload.types.document import Range
from evenload.types.layout import even_layout
from gloo_pool import TIMEOUT_S
from quick_calibration import quick_calibration
from reference_training import tiny_config
from single_stage import stage_of


def tiny_stage():
    config = tiny_config("mistral")
    return stage_of(config, torch.float32)[0], model_from_config(config.to_dict(), "tiny", 4)


def _calibrated_on_a_rank():
    stage, model = tiny_stage()
    layout = even_layout(4)
    mesh = create_meshes([layout], torch.device("cpu"), TIMEOUT_S).start
    with quick_calibration():
        return msgspec.json.encode(calibrate({mesh.pp_rank: stage}, model, mesh, 256, "this machine")[0])


def test_calibration_measures_a_real_stage(gloo_pool):
    """Every time is positive somewhere, backward costs more than forward, and all is finite (the struct checks)."""
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


def _overlap_of_a_rank(sizes):
    result = overlap_cost(create_meshes([even_layout(2, **sizes)], torch.device("cpu"), TIMEOUT_S).start)
    return None if result is None else (result.communication_slowdown, result.compute_slowdown)


@pytest.mark.parametrize("sizes", [{"dp": 2}, {"cp": 2}], ids=str)
def test_collectives_beside_compute_are_timed_where_ranks_hold_the_same_weights(gloo_pool, sizes):
    """How much they cost each other is this machine's; that both go on at once is not."""
    for communication, compute in gloo_pool.run(2, _overlap_of_a_rank, sizes):
        assert communication > 0
        assert 0 <= compute < 1, "products were computed while collectives ran"
    assert gloo_pool.run(2, _overlap_of_a_rank, {"pp": 2}) == [None, None]


def test_weight_gradients_that_are_put_off_are_timed():
    """All that waited is added: gradients are those of whole backwards, and it takes less than these."""
    stage, model = tiny_stage()
    clock = pack_clock(stage, SimpleNamespace(tensor=None))
    parameters = [one for layer in stage.model.layers.values() for one in layer.parameters()]
    for one in parameters:
        one.main_grad.zero_()
    found_s = weight_seconds(stage, clock, 3)
    assert all(one.main_grad.abs().sum() > 0 for one in parameters if one.dim() == 2)
    whole_s = sum(one.seconds for one in time_round(stage, whole(*[128] * 8), clock)) / model.num_layers
    assert 0 < found_s < whole_s


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


@pytest.mark.parametrize(
    ("kind", "lora", "balance"), [("gemma3", None, 0.0), ("mixtral", None, 0.1), ("gemma2", LoraConfig(rank=2), 0.0)]
)
def test_packs_of_every_kind_of_model_are_timed(kind, lora, balance):
    """Balance needs a step's documents, adapters have no gradient of the base, capped scores have another backend."""
    stage, _ = stage_of(tiny_config(kind), torch.float32, lora=lora, router_aux_loss_coef=balance)
    packs = tuple(tuple(Range(doc, *cut) for doc in range(2)) for cut in ((0, 20), (20, 32)))
    assert num_tokens_of(packs) == {0: 32, 1: 32}
    timed = list(time_round(stage, packs, PackClock(stage.device)))
    assert [(sample.direction, sample.ranges) for sample in timed] == [
        ("forward", packs[0]),
        ("forward", packs[1]),
        ("backward", packs[1]),
        ("backward", packs[0]),
    ]
    assert all(sample.seconds > 0 for sample in timed)
