"""Figures of a comparison, by hand."""

import msgspec
import numpy as np
import pytest

from bench_samples import batch_run, result_of, runs
from cost_samples import sample_coefficients, sample_model
from evenload.bench.results import BenchResult, MachineLoad, measured_ratio, pack_errors, verdict
from evenload.cost.coefficients import MeasuredOn, Noise
from evenload.types.plan import PackTimes
from report_samples import make_timeline


def test_errors_are_predicted_over_measured_medians():
    one = batch_run(measured_s=(2.0, 10.0, 1.9), predicted_s=1.5)
    assert one.step_time_s == 2.0
    assert one.error == pytest.approx(-0.25)
    assert one.memory_error == pytest.approx(-0.1)


def test_batches_are_averaged_and_rounds_are_compared_as_wholes():
    result = runs("a", batch_run(measured_s=(1.0, 3.0, 1.0)), batch_run(measured_s=(5.0, 3.0, 4.0), predicted_s=2.0))
    assert (result.measured_s, result.predicted_s, result.error) == (2.5, 1.5, pytest.approx(-0.4))
    # Rounds took 6, 6 and 5 seconds.
    assert result.spread == pytest.approx(1 / 6)
    assert result.tokens_per_s == pytest.approx(200 / 5.0)


@pytest.mark.parametrize("split", [False, True])
def test_pack_errors_compare_every_pack_on_every_stage(split):
    """Predicted 10 % short of every forward, right on every backward, where parts of a backward are apart or not."""
    timeline = make_timeline(num_dp=2, num_ranks=2, num_packs=3, split=split)
    seconds = timeline.end_s - timeline.start_s
    times = []
    for dp_rank in range(2):
        by_kind = [np.zeros((3, 2)) for _ in range(4)]
        for task in np.flatnonzero(timeline.dp_rank == dp_rank):
            by_kind[timeline.kind[task]][timeline.pack[task], timeline.stage[task]] = seconds[task]
        forward, backward, inputs, weights = (tuple(map(tuple, one.tolist())) for one in by_kind)
        shorter = tuple(tuple(0.9 * value for value in row) for row in forward)
        none = (0.0,) * 3
        times.append(
            PackTimes(
                forward_s=shorter,
                backward_s=backward,
                p2p_forward_s=none,
                p2p_backward_s=none,
                input_s=inputs if split else (),
                weight_s=weights if split else (),
            )
        )
    noisy = np.stack([seconds, 0.8 * seconds, 1.3 * seconds])
    result = pack_errors(tuple(times), timeline, noisy)
    forwards = timeline.kind == 0
    expected = np.where(forwards, -0.1, 0.0)
    assert result.median == pytest.approx(np.median(expected))
    assert result.median_abs == pytest.approx(np.median(-expected))
    assert result.p90_abs == pytest.approx(0.1)
    # A third of all repeats lies 30 % from the median, so the 90th percentile does.
    assert result.repeat_p90 == pytest.approx(0.3)


def strategy(name, *rounds):
    """Two batches, the second one of twice the time, in some rounds."""
    return runs(name, batch_run(tuple(rounds)), batch_run(tuple(2 * seconds for seconds in rounds)))


QUIET = strategy("best_fit", 1.32, 1.33, 1.31), strategy("slimpack", 1.0, 1.01, 1.0)
NOISY = strategy("best_fit", 1.0, 1.6, 1.1), strategy("slimpack", 1.4, 0.9, 1.0)


def test_a_quiet_machine_tells_which_is_faster_and_by_how_much():
    result = result_of(*QUIET)
    (ratio,) = result.ratios
    assert (ratio.one, ratio.other, ratio.is_clear) == ("best_fit", "slimpack", True)
    assert ratio.ratio == pytest.approx(1.32)
    assert ratio.low is not None
    assert ratio.high is not None
    assert 1.29 < ratio.low < 1.32 < ratio.high < 1.35
    assert result.winner == "slimpack"
    assert (
        result.outcome
        == f"best_fit takes 1.32 times as long as slimpack (95 % interval {ratio.low:.2f} to {ratio.high:.2f})"
    )


def test_a_difference_within_the_spread_of_its_repeats_is_not_claimed():
    """Medians differ by 10 %; the rounds by more."""
    result = result_of(*NOISY)
    assert result.ratios[0].ratio == pytest.approx(1.1)
    assert not result.ratios[0].is_clear
    assert result.winner == ""
    assert result.outcome.startswith("this machine is too noisy to tell: best_fit takes 0.")
    assert "1.10" not in result.outcome


def test_of_several_strategies_the_fastest_wins_where_it_is_told_apart_from_every_other():
    far = strategy("padded", 3.0, 3.02, 3.01)
    assert result_of(far, *QUIET).winner == "slimpack"
    undecided = result_of(far, *NOISY)
    assert undecided.winner == ""
    assert "best_fit" in undecided.outcome
    alone = result_of(far)
    assert (alone.winner, alone.ratios, alone.outcome) == ("padded", (), "padded takes 4.51 s a step")


@pytest.mark.parametrize("true_ratio", [1.0, 1.2])
@pytest.mark.parametrize("noise", [0.03, 0.3])
def test_intervals_hold_the_true_ratio_and_equal_strategies_are_rarely_told_apart(true_ratio, noise):
    """Of 400 comparisons with noise of a known size: 95 % hold it, and one in twenty at most claims what is not so."""
    rng = np.random.default_rng(3)

    def drawn(name, factor):
        noises = np.exp(noise * rng.standard_normal((3, 3)))
        return runs(
            name, *(batch_run(tuple(factor * size * one)) for size, one in zip((1.0, 0.5, 2.0), noises, strict=True))
        )

    result = [measured_ratio(drawn("a", true_ratio), drawn("b", 1.0)) for _ in range(400)]
    assert sum(one.low <= true_ratio <= one.high for one in result if one.low and one.high) >= 0.93 * 400
    assert sum(one.is_clear and (one.ratio < 1 or true_ratio == 1) for one in result) <= 0.06 * 400


@pytest.mark.parametrize(
    ("predicted", "low", "high", "is_quiet", "expected"),
    [
        (1.37, 1.29, 1.35, True, "agrees"),
        (1.37, 1.20, 1.30, True, "cannot tell"),  # within 10 % and beyond
        (1.37, 1.10, 1.20, True, "disagrees"),
        (1.37, 1.55, 1.60, True, "disagrees"),
        (1.37, 1.29, 1.35, False, "cannot tell"),  # a busy machine
        (1.37, None, None, True, "cannot tell"),  # one round
        (1.00, 0.97, 1.04, True, "agrees"),
        (0.94, 1.01, 1.03, True, "disagrees"),  # within 10 %, and the other one is faster
        (1.06, 0.97, 0.99, True, "disagrees"),
        (0.97, 1.01, 1.03, True, "agrees"),  # predicted to be as fast as each other
        (1.30, 0.80, 2.00, True, "cannot tell"),
    ],
)
def test_a_predicted_factor_is_judged_by_the_interval_of_the_measured_one(predicted, low, high, is_quiet, expected):
    assert verdict(predicted, low, high, is_quiet=is_quiet) == expected


BUSY = MachineLoad(demand=1.0, waited_share=0.3)
BUSY_BEFORE = sample_coefficients(
    measured_on=MeasuredOn(model=sample_model(), dp=1, cp=1, pp=2, tp=1, noise=Noise(waited_share=0.4, spread=0.1))
)


@pytest.mark.parametrize(
    ("theirs_s", "changes", "expected"),
    [(1.32, {}, "agrees"), (1.9, {}, "disagrees"), (1.32, {"load": BUSY}, "cannot tell"),
     (1.32, {"coefficients": BUSY_BEFORE}, "cannot tell")],
    ids=["right", "wrong", "busy steps", "busy calibration"],
)  # fmt: skip
def test_every_round_and_the_verdict_are_in_the_result(theirs_s, changes, expected):
    """Factors of whole rounds: 1.32 / 1, 1.33 / 1.01, 1.31 / 1; and JSON holds them, made from the runs."""
    theirs = runs("best_fit", *(batch_run((n * 1.32, n * 1.33, n * 1.31), n * theirs_s) for n in (1, 2)))
    ours = runs("slimpack", *(batch_run((n * 1.0, n * 1.01, n * 1.0), n * 1.0) for n in (1, 2)))
    result = result_of(theirs, ours, **changes)
    (ratio,) = result.ratios
    assert ratio.rounds == pytest.approx((1.32, 1.33 / 1.01, 1.31))
    assert ratio.by_round == "slimpack over best_fit by round: 1.32, 1.32, 1.31"
    assert ratio.predicted == pytest.approx(theirs_s)
    assert ratio.verdict == expected
    content = msgspec.json.encode(result)
    assert msgspec.json.decode(content)["ratios"][0]["verdict"] == expected
    again = msgspec.json.decode(content.replace(b'"agrees"', b'"disagrees"'), type=BenchResult)
    assert again == result
