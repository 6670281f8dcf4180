"""Figures of a comparison, by hand."""

import numpy as np
import pytest

from bench_samples import batch_run, runs
from evenload.bench.runs import loss_difference, pack_errors, ranked_pairs, task_seconds
from evenload.types.plan import PackTimes
from report_samples import make_timeline


def test_errors_are_predicted_over_measured_medians():
    one = batch_run(measured_s=(2.0, 10.0, 1.9), predicted_s=1.5)
    assert one.step_time_s == 2.0
    assert one.error == pytest.approx(-0.25)
    assert one.memory_error == pytest.approx(-0.1)


def test_batches_are_averaged_and_rounds_are_compared_as_wholes():
    found = runs("a", batch_run(measured_s=(1.0, 3.0, 1.0)), batch_run(measured_s=(5.0, 3.0, 4.0), predicted_s=2.0))
    assert (found.measured_s, found.predicted_s, found.error) == (2.5, 1.5, pytest.approx(-0.4))
    # Rounds took 6, 6 and 5 seconds.
    assert found.spread == pytest.approx(1 / 6)
    assert found.tokens_per_s == pytest.approx(200 / 5.0)


@pytest.mark.parametrize("split", [False, True])
def test_pack_errors_compare_every_pack_on_every_stage(split):
    """Predicted 10 % short of every forward, right on every backward, where parts of a backward are apart or not."""
    timeline = make_timeline(num_dp=2, num_ranks=2, num_packs=3, split=split)
    seconds = task_seconds(timeline)
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
    found = pack_errors(tuple(times), timeline, noisy)
    forwards = timeline.kind == 0
    expected = np.where(forwards, -0.1, 0.0)
    assert found.median == pytest.approx(np.median(expected))
    assert found.median_abs == pytest.approx(np.median(-expected))
    assert found.p90_abs == pytest.approx(0.1)
    # A third of all repeats lies 30 % from the median, so the 90th percentile does.
    assert found.repeat_p90 == pytest.approx(0.3)


def test_losses_are_compared_batch_by_batch():
    one = runs("a", batch_run(loss=2.0), batch_run(loss=4.0))
    other = runs("b", batch_run(loss=2.0), batch_run(loss=4.4))
    assert loss_difference((one, other)) == pytest.approx(0.4 / 4.4)
    assert loss_difference((one,)) == 0.0


def test_only_pairs_that_differ_are_ranked():
    fast, near = runs("fast", batch_run((1.0,), 1.0)), runs("near", batch_run((1.04,), 0.9))
    slow, wrong = runs("slow", batch_run((2.0,), 1.5)), runs("wrong", batch_run((3.0,), 1.2))
    # fast-near is too close; slow-wrong is predicted the other way round.
    assert ranked_pairs((fast, near, slow, wrong), 0.05) == (4, 5)
