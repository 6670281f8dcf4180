"""The calibration's packs timed again: by how much they differ from what the costs say is the machine's drift."""

import statistics
from types import SimpleNamespace

import msgspec
import pytest
import torch

from cost_samples import sample_coefficients, sample_model
from evenload.calibrate import yardstick
from evenload.calibrate.rounds import Sample, whole
from evenload.calibrate.yardstick import Yardstick, can_tell_drift
from evenload.cost.coefficients import MeasuredOn, PassCoefficients
from evenload.runtime.comm.mesh import create_mesh
from evenload.types.layout import even_layout
from gloo_pool import TIMEOUT_S

FORWARD = PassCoefficients(
    linear_s_per_token=2e-6, attention_s_per_pair=3e-9, prefix_s_per_token=5e-9, slice_s=7e-6, pack_s=1e-4
)
BACKWARD = PassCoefficients(
    linear_s_per_token=4e-6, attention_s_per_pair=8e-9, prefix_s_per_token=9e-9, slice_s=1e-5, pack_s=2e-4
)
COSTS = msgspec.structs.replace(sample_coefficients(), forward=FORWARD, backward=BACKWARD, attention_tile=1)


def test_seconds_are_those_that_the_costs_say_of_the_layers():
    """One document of 128 tokens through two layers of which one has a window of 16: counted by hand."""
    model = msgspec.structs.replace(sample_model(), sliding_windows=(0, 16, 0), num_layers=3)
    mesh = SimpleNamespace(layout=even_layout(3, tp=2))
    stage = SimpleNamespace(model=SimpleNamespace(layers=range(2)))
    one = Yardstick(stage, model, COSTS, 128, mesh)
    (pack,) = whole(128)
    full, banded = 128 * 129 / 2, 16 * 17 / 2 + 112 * 16
    shared_s = 2 * 128 * 2e-6 + (full + banded) * 3e-9
    assert one._costed_s("forward", pack) == pytest.approx(shared_s / 2 + 2 * (7e-6 + 1e-4))


def _drift_of_a_rank(factors):
    """Packs take by turns so many times what the costs say."""
    mesh = create_mesh(even_layout(3, pp=2), torch.device("cpu"), TIMEOUT_S)
    stage = SimpleNamespace(model=SimpleNamespace(layers=range(1)), device=mesh.device)
    one = Yardstick(stage, sample_model(), COSTS, 512, mesh)
    for factor in factors[mesh.rank]:

        def timed(stage, packs, factor=factor):
            for direction in ("forward", "backward"):
                yield Sample(direction, packs[0], factor * one._costed_s(direction, packs[0]))

        yardstick.time_round, before = timed, yardstick.time_round
        one.measure()
        yardstick.time_round = before
    return one.drift()


def test_drift_is_of_medians_and_the_mean_of_all_ranks(gloo_pool):
    factors = ((1.1, 5.0, 1.0), (0.9, 0.8, 0.9))
    expected = statistics.mean((1.1, 0.9)) - 1
    assert gloo_pool.run(2, _drift_of_a_rank, factors) == [pytest.approx(expected)] * 2


def test_packs_under_another_tp_are_no_yardstick():
    """Costs of whole matrices price the transfers of a tensor-parallel group apart; its packs contain them."""
    measured_on = MeasuredOn(model=sample_model(), dp=2, cp=1, pp=1, tp=1)
    measured = msgspec.structs.replace(COSTS, source="calibrated", measured_on=measured_on)
    assert can_tell_drift(measured, even_layout(3, pp=3))
    assert not can_tell_drift(measured, even_layout(3, tp=2))
    assert not can_tell_drift(msgspec.structs.replace(measured, source="analytic"), even_layout(3))
    assert not can_tell_drift(msgspec.structs.replace(measured, measured_on=None), even_layout(3))
