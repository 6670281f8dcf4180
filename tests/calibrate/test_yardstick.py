"""The calibration's packs timed again: by how much they differ from what they took then is the machine's drift."""

import statistics
from types import SimpleNamespace

import msgspec
import pytest
import torch

from cost_samples import sample_coefficients, sample_model
from evenload.calibrate import yardstick
from evenload.calibrate.assemble import RankMeasurement, coefficients_of
from evenload.calibrate.rounds import Sample, whole
from evenload.calibrate.yardstick import Yardstick, can_tell_drift
from evenload.cost.measured_on import Disturbance, MeasuredOn, MeasuredPack
from evenload.runtime.comm.mesh import create_meshes
from evenload.types.layout import even_layout
from gloo_pool import TIMEOUT_S

PACKS = tuple(
    MeasuredPack(direction=direction, slices=tuple(tuple(one) for one in pack), seconds=seconds)
    for (pack,), seconds in ((whole(128), 2e-3), (whole(512), 9e-3))
    for direction in ("forward", "backward")
)
MEASURED_ON = MeasuredOn(model=sample_model(), dp=2, cp=1, pp=1, tp=1, packs=PACKS)
COSTS = msgspec.structs.replace(sample_coefficients(), source="calibrated", measured_on=MEASURED_ON)


def _drift_of_a_rank(factors):
    """Packs take by turns so many times what they took when costs were measured, on each of a stage's two layers."""
    mesh = create_meshes([even_layout(3, pp=2)], torch.device("cpu"), TIMEOUT_S).start
    stage = SimpleNamespace(model=SimpleNamespace(layers=range(2)), device=mesh.device)
    one = Yardstick(stage, COSTS, mesh)
    for factor in factors[mesh.rank]:

        def timed(stage, packs, clock, factor=factor):
            for pack in PACKS:
                if pack.slices == packs[0]:
                    yield Sample(pack.direction, packs[0], 2 * factor * pack.seconds)

        yardstick.time_round, before = timed, yardstick.time_round
        one.measure()
        yardstick.time_round = before
    return one.drift()


def test_drift_is_of_medians_and_the_mean_of_all_ranks(gloo_pool):
    factors = ((1.1, 5.0, 1.0), (0.9, 0.8, 0.9))
    expected = statistics.mean((1.1, 0.9)) - 1
    assert gloo_pool.run(2, _drift_of_a_rank, factors) == [pytest.approx(expected)] * 2


def _reference_of_a_rank(wanted):
    """Packs of a round take 2 s in the first pass, then 4, 6, ... on each of a stage's two layers."""
    mesh = create_meshes([even_layout(3, pp=2)], torch.device("cpu"), TIMEOUT_S).start
    stage = SimpleNamespace(model=SimpleNamespace(layers=range(2)), device=mesh.device)
    seen = []

    def timed(stage, packs, clock):
        seen.append(packs)
        for direction in ("forward", "backward"):
            yield Sample(direction, packs[0], 4.0 * seen.count(packs))

    yardstick.time_round, before = timed, yardstick.time_round
    found = yardstick.reference(stage, wanted, None, mesh)
    yardstick.time_round = before
    return found, seen


def test_the_reference_is_of_the_yardsticks_rounds_that_were_timed(gloo_pool):
    """Medians of passes over them alone, one after the other."""
    wanted = [whole(16), whole(128), whole(4096), whole(512)]
    for found, seen in gloo_pool.run(2, _reference_of_a_rank, wanted):
        assert seen == [whole(128), whole(512)] * (len(seen) // 2)
        median_s = 2.0 * statistics.median(range(1, len(seen) // 2 + 1))
        assert found == tuple(
            Sample(direction, packs[0], median_s)
            for packs in (whole(128), whole(512))
            for direction in ("forward", "backward")
        )


def test_packs_under_another_tp_are_no_yardstick():
    """Packs of a tensor-parallel group are parts of matrices, and contain its transfers."""
    assert can_tell_drift(COSTS, even_layout(3, pp=3))
    assert not can_tell_drift(COSTS, even_layout(3, tp=2))
    without_packs = msgspec.structs.replace(MEASURED_ON, packs=())
    assert not can_tell_drift(msgspec.structs.replace(COSTS, measured_on=without_packs), even_layout(3))
    assert not can_tell_drift(msgspec.structs.replace(COSTS, measured_on=None), even_layout(3))


def test_a_calibration_keeps_the_seconds_of_its_packs():
    """The mean of the ranks, of packs of the yardstick alone, timed as they are again later."""
    (short,), (long,) = whole(128), whole(4096)
    ranks = [
        RankMeasurement(
            disturbance=Disturbance(waited_share=10 * seconds, spread=0.6 - 100 * seconds),
            packs=tuple(Sample(d, pack, 9 * seconds) for d in ("forward", "backward") for pack in (short, long)),
            yardstick=tuple(Sample(d, short, seconds) for d in ("forward", "backward")),
            head=((1, 1.0), (2, 2.0)),
            peak_flops_per_s=1e9,
            optimizer_s=1e-9,
            copy_s_per_byte=1e-9,
            weight_s=1e-3,
        )
        for seconds in (1e-3, 3e-3)
    ]
    found = coefficients_of(ranks, sample_model(), "cpu", even_layout(3, dp=2))
    measured_on = found.measured_on
    assert measured_on is not None
    assert [(pack.direction, pack.slices) for pack in measured_on.packs] == [("forward", short), ("backward", short)]
    assert all(pack.seconds == pytest.approx(2e-3) for pack in measured_on.packs)
    # How busy the machine was meanwhile stands beside them: the most that any rank had of either.
    assert found.disturbance == Disturbance(waited_share=pytest.approx(0.03), spread=pytest.approx(0.5))
