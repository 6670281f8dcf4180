"""Coefficients of hosts and devices that were timed apart, from samples whose truth is known."""

import dataclasses

import msgspec
import numpy as np
import pytest

from cost_samples import BACKWARD, FORWARD, sample_model
from evenload.calibrate.calibrate import RankMeasurement, coefficients_of
from evenload.calibrate.kernels import TOKENS
from evenload.calibrate.rounds import QUICK_ROUNDS, Sample, pack_features, rounds_up_to
from evenload.cost.coefficients import Noise
from evenload.cost.groups import WEIGHT_RINGS
from evenload.types.cluster import LinkSpec
from evenload.types.layout import even_layout

DEVICE = {
    "forward": msgspec.structs.replace(FORWARD, prefix_s_per_token=0.003, host_slice_s=0.5, host_pack_s=2000.0),
    "backward": msgspec.structs.replace(BACKWARD, prefix_s_per_token=0.006, host_slice_s=0.75, host_pack_s=6000.0),
}


def device_seconds(truth, ranges, windows=(0,)):
    rates = (
        truth.linear_s_per_token,
        truth.slice_s,
        truth.pack_s,
        truth.attention_s_per_pair,
        truth.prefix_s_per_token,
    )
    return float(np.dot(pack_features(ranges, windows), rates))


def sample(direction, ranges, windows, *, is_apart):
    truth = DEVICE[direction]
    host_s = truth.host_slice_s * len(ranges) + truth.host_pack_s if is_apart else 0.0
    return Sample(direction, ranges, device_seconds(truth, ranges, windows), host_s, windows)


def measured(*, is_apart):
    """Small packs on three layers of which one has a window, large ones on one without."""
    rounds = [(packs, (0, 0, 512)) for packs in QUICK_ROUNDS] + [(packs, (0,)) for packs in rounds_up_to(16384, 16384)]
    samples = tuple(
        sample(direction, ranges, windows, is_apart=is_apart)
        for direction in ("forward", "backward")
        for packs, windows in rounds
        for ranges in packs
    )
    return RankMeasurement(
        noise=Noise(waited_share=0.0, spread=0.0),
        packs=samples,
        head=((1, 1.0), (2, 2.0)),
        peak_flops_per_s=1e9,
        optimizer_s=1e-9,
        copy_s_per_byte=1e-9,
        weight_s=700.0,
    )


def test_weight_gradients_have_their_share_of_the_linears_seconds():
    """Of 1,024 tokens' and a pack's; under tp but for the transfers that come on top, and on a part of every matrix."""
    truth, ranks = DEVICE["backward"], [measured(is_apart=True)] * 2
    linear_s = TOKENS * truth.linear_s_per_token + truth.pack_s
    alone = coefficients_of(ranks, sample_model(), "some GPU", even_layout(3, dp=2))
    assert alone.weight_share == pytest.approx(700.0 / linear_s, rel=1e-5)
    link = LinkSpec(bandwidth_bytes_per_s=1e3, latency_s=2.0)
    linked = [dataclasses.replace(rank, links={"tensor": link}) for rank in ranks]
    split = coefficients_of(linked, sample_model(num_kv_heads=2), "some GPU", even_layout(3, tp=2))
    rings_s = WEIGHT_RINGS * (TOKENS * 8 * 2 / 2 / 1e3 + 2.0)
    assert split.weight_share == pytest.approx((700.0 - rings_s) / linear_s, rel=1e-5)


@pytest.mark.parametrize("is_apart", [True, False])
def test_both_come_back_and_neither_bends_the_other(is_apart):
    """Small packs would take their host's seconds, and a fit of what they take would be off for all."""
    ranks = [measured(is_apart=is_apart)] * 2
    found = coefficients_of(ranks, sample_model(), "some GPU", even_layout(3, dp=2))
    for direction, truth in DEVICE.items():
        expected = truth if is_apart else msgspec.structs.replace(truth, host_slice_s=0.0, host_pack_s=0.0)
        fields = msgspec.structs.asdict(getattr(found, direction))
        assert fields == {
            name: value if value is None else pytest.approx(value, rel=1e-5)
            for name, value in msgspec.structs.asdict(expected).items()
        }
