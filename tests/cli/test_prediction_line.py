"""Steps that all take another time than predicted: said once, with what to do."""

import pytest

from evenload.cli.run_lines import prediction_line


@pytest.mark.parametrize(
    ("ratios", "words"),
    [
        ((0.66, 0.7, 0.68), ("0.68 times", "was busier when")),
        ((1.5, 2.0, 1.3), ("1.50 times", "busier or slower now")),
    ],
    ids=["faster", "slower"],
)
def test_predictions_that_are_off_for_every_step_are_told(ratios, words) -> None:
    line = prediction_line(ratios, "a CPU", None, lambda: 0.0)
    for word in (*words, "(a CPU)", "train.recalibrate=true"):
        assert word in line


def test_a_machine_that_is_busy_now_is_the_reason_and_not_measured_anew() -> None:
    line = prediction_line((1.5, 2.0, 1.83), "a CPU", None, lambda: 0.4)
    assert line.startswith(
        "steps take 1.83 times their predicted time: other programs held cores that this run needed for 40%"
    )
    assert "recalibrate" not in line
    # Steps that are faster than predicted have another reason.
    assert "was busier when costs were measured" in prediction_line((0.66, 0.7, 0.68), "a CPU", None, lambda: 0.4)
