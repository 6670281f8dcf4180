"""The fit of coefficients: what it recovers, and how far off it says it is."""

import dataclasses
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_samples import BACKWARD, FORWARD, sample_model
from evenload.calibrate.calibrate import DIRECTIONS, RankMeasurement, coefficients_of, pass_timings
from evenload.calibrate.fit import cross_validate, fit_relative
from evenload.calibrate.kernels import TOKENS
from evenload.calibrate.profile import _best_tile
from evenload.calibrate.rounds import GRID, QUICK_ROUNDS, LayerShares, Sample, pack_features, rounds_up_to
from evenload.cost.coefficients import Noise
from evenload.cost.group_transfers import WEIGHT_RINGS
from evenload.types.cluster import LinkSpec
from evenload.types.layout import even_layout

COEFFICIENTS = st.tuples(
    *(st.floats(low, high) for low, high in ((1e-7, 1e-4), (1e-7, 1e-3), (1e-5, 1e-2), (1e-10, 1e-7), (1e-9, 1e-6)))
)
"""Seconds a token, slice, pack, pair and token of prefix, from small models on a GPU to large ones on a CPU."""


def grid_features(rounds, tile=1):
    return [pack_features(ranges, (LayerShares(),), tile) for packs in rounds for ranges in packs]


@given(truth=COEFFICIENTS, rounds=st.sampled_from([QUICK_ROUNDS, GRID]), tile=st.sampled_from([1, 64, 256]))
def test_known_coefficients_come_back(truth, rounds, tile):
    """Seconds made from coefficients determine them: the rounds vary every feature independently, with tiles, too."""
    features = grid_features(rounds, tile)
    seconds = (np.array(features) @ np.array(truth)).tolist()
    assert fit_relative(features, seconds) == pytest.approx(truth, rel=1e-5)


@given(truth=COEFFICIENTS, seed=st.integers(0, 100))
def test_exact_seconds_leave_no_error_and_noise_shows(truth, seed):
    """Packs that were left out of a fit to exact seconds are predicted exactly; noise of 10 % is told as about that."""
    features = grid_features(GRID)
    exact = np.array(features) @ np.array(truth)
    packs = list(range(len(features)))
    assert cross_validate(features, exact.tolist(), packs).error.p90 < 1e-4
    noise = np.random.default_rng(seed).choice([0.9, 1.1], len(exact))
    noisy = cross_validate(features, (exact * noise).tolist(), packs).error
    assert 0.02 < noisy.p90 < 1.0


def test_the_table_of_kernels_by_rows_and_keys_comes_back_from_packs():
    """WLB-LLM Fig. 10 from a kernel that pads to 128 rows and reads all keys once a call, timed in whole layers with
    noise: the tile is found, and seconds of kernels that no pack has are right, of fewer rows than a tile and of more.
    """
    pair_s, read_s = 4e-10, 6e-8  # reading a key takes as long as 150 rows of it

    def kernel_s(rows, keys):
        return pair_s * (rows * (keys - (rows - 1) / 2) + -rows % 128 * keys) + read_s * (keys - rows)

    def layer_s(pack):
        linear_s = 1e-6 * sum(stop - start for _, start, stop in pack) + 2e-6 * len(pack) + 5e-5
        return linear_s + sum(kernel_s(stop - start, stop) for _, start, stop in pack)

    packs = [pack for rounds in GRID for pack in rounds]
    noise = np.random.default_rng(0).normal(1.0, 0.005, len(packs))
    samples = [
        Sample(direction, pack, layer_s(pack) * factor)
        for direction in DIRECTIONS
        for pack, factor in zip(packs, noise, strict=True)
    ]
    measured = [SimpleNamespace(packs=tuple(samples))]
    tile, _ = _best_tile(measured)
    assert tile == 128
    *_, pairs, prefix = fit_relative(*pass_timings(measured, "forward", tile)[:2])
    for rows in (16, 48, 128, 200, 256, 384, 1024):
        for keys in (2048, 12_288, 65_536):
            *_, own_pairs, own_prefix = pack_features(((0, keys - rows, keys),), (LayerShares(),), tile)
            assert pairs * own_pairs + prefix * own_prefix == pytest.approx(kernel_s(rows, keys), rel=0.03)


DEVICE = {
    "forward": msgspec.structs.replace(FORWARD, prefix_s_per_token=0.003, host_slice_s=0.5, host_pack_s=2000.0),
    "backward": msgspec.structs.replace(BACKWARD, prefix_s_per_token=0.006, host_slice_s=0.75, host_pack_s=6000.0),
}


def layers_of(windows):
    """Mean layers with these windows."""
    return tuple(LayerShares(reach=window) for window in windows)


def device_seconds(truth, ranges, windows=(0,)):
    per_slice = truth.linear_s_per_token, truth.slice_s, truth.pack_s
    return float(
        np.dot(
            pack_features(ranges, layers_of(windows)),
            (*per_slice, truth.attention_s_per_pair, truth.prefix_s_per_token),
        )
    )


def sample(direction, ranges, windows, *, is_apart):
    truth = DEVICE[direction]
    host_s = truth.host_slice_s * len(ranges) + truth.host_pack_s if is_apart else 0.0
    return Sample(direction, ranges, device_seconds(truth, ranges, windows), host_s, layers_of(windows))


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
    rings_s = 2 * WEIGHT_RINGS * (TOKENS * 8 * 2 / 2 / 1e3 + 2.0)
    assert split.weight_share == pytest.approx((700.0 - rings_s) / linear_s, rel=1e-5)


@pytest.mark.parametrize("is_apart", [True, False])
def test_both_come_back_and_neither_bends_the_other(is_apart):
    """Small packs would take their host's seconds, and a fit of what they take would be off for all."""
    ranks = [measured(is_apart=is_apart)] * 2
    result = coefficients_of(ranks, sample_model(), "some GPU", even_layout(3, dp=2))
    for direction, truth in DEVICE.items():
        expected = truth if is_apart else msgspec.structs.replace(truth, host_slice_s=0.0, host_pack_s=0.0)
        fields = msgspec.structs.asdict(getattr(result, direction))
        assert fields == {
            name: value if value is None else pytest.approx(value, rel=1e-5)
            for name, value in msgspec.structs.asdict(expected).items()
        }
