"""Which interval a prediction carries, and what it says of itself."""

import math

import msgspec
import pytest

from cost_samples import sample_coefficients, sample_model
from evenload.cost.coefficients import MeasuredOn, Noise
from evenload.explore import prediction_interval as intervals
from evenload.explore.prediction_interval import ANY_LAYOUT, KindInterval, prediction_interval
from evenload.types.layout import even_layout


def measured_overlap(waited_share: float, spread: float):
    """Costs of a CPU whose calibration was disturbed by as much."""
    noise = Noise(waited_share=waited_share, spread=spread)
    where = MeasuredOn(model=sample_model(), dp=1, cp=1, pp=2, tp=1, noise=noise)
    return sample_coefficients(device="AMD EPYC, 1 thread a process", measured_on=where)


CPU = measured_overlap(0.0, 0.0)
OF_ALL = KindInterval(device="AMD EPYC", layout=ANY_LAYOUT, low=0.9, high=1.2, rows=90, cases=9)
OF_PIPELINES = KindInterval(device="AMD EPYC", layout="pp", low=0.95, high=1.05, rows=50, cases=5)


@pytest.fixture
def ledger(monkeypatch):
    def hold(*found):
        monkeypatch.setattr(intervals, "ledger_intervals", lambda: found)

    return hold


def test_data_sheets_carry_the_largest_published_error_and_say_so():
    result = prediction_interval(sample_coefficients(source="analytic"), even_layout(4))
    assert (result.low, result.high) == (pytest.approx(1 / 1.218), pytest.approx(1 / 0.782))
    assert "from published errors of comparable simulators, not from our ledger" in result.describe()
    # A prediction of 1 s at either end is off by just that error.
    assert [1 / seconds - 1 for seconds in result.of(1.0)] == [pytest.approx(0.218), pytest.approx(-0.218)]


def test_measured_costs_carry_the_ledgers_interval_of_their_layout(ledger):
    ledger(OF_ALL, OF_PIPELINES)
    of_pipeline, of_replicas = (prediction_interval(CPU, even_layout(4, **axes)) for axes in ({"pp": 2}, {"dp": 2}))
    assert of_pipeline.of(2.0) == pytest.approx((1.9, 2.1))
    assert of_replicas.of(2.0) == pytest.approx((1.8, 2.4))
    assert "pp: 50 rows of 5 cases in docs/accuracy.md" in of_pipeline.describe()


def test_measured_costs_without_rows_say_so(ledger):
    ledger()
    result = prediction_interval(CPU, even_layout(4))
    assert "measured costs of AMD EPYC, too few rows of it in docs/accuracy.md: from published errors" in result.basis
    assert result.low == pytest.approx(1 / 1.135)


def test_what_disturbed_the_calibration_widens_the_interval(ledger):
    """Half widths add by their squares, in logarithms and around the middle; more of either noise is more."""
    ledger(OF_ALL)
    low, high = prediction_interval(measured_overlap(0.0, 0.4), even_layout(4)).of(1.0) or (0.0, 0.0)
    middle, half = math.sqrt(0.9 * 1.2), math.log(1.2 / 0.9) / 2
    factor = math.exp(math.sqrt(half**2 + math.log(1.4) ** 2))
    assert (low, high) == pytest.approx((middle / factor, middle * factor))
    widths = []
    for waited_share, spread in ((0.0, 0.0), (0.0, 0.1), (0.1, 0.1), (0.1, 0.3), (0.15, 0.5)):
        result = prediction_interval(measured_overlap(waited_share, spread), even_layout(4))
        assert result.low is not None
        assert result.high is not None
        widths.append(result.high / result.low)
        assert f"there 0.90 to 1.20; here ranks waited {waited_share:.0%} of the time for a core" in result.describe()
    assert widths == sorted(set(widths))
    assert widths[0] == pytest.approx(1.2 / 0.9)


@pytest.mark.parametrize(("waited_share", "spread"), [(0.16, 0.0), (0.0, 0.51), (1.0, 3.0)])
@pytest.mark.parametrize("rows", [(OF_ALL,), ()], ids=["ledger", "published"])
def test_a_busy_machine_has_no_interval(ledger, waited_share, spread, rows):
    """Neither learnt nor published, and nothing is counted inside it."""
    ledger(*rows)
    result = prediction_interval(measured_overlap(waited_share, spread), even_layout(4))
    assert (result.low, result.high, result.of(1.0), result.count_inside([1.0])) == (None, None, None, "")
    assert result.describe().startswith(
        "no 90 % interval of step times: the machine was busy while its costs were measured: ranks waited "
        f"{waited_share:.0%} of the time for a core"
    )


def test_costs_that_were_measured_too_few_times_have_no_interval():
    """The ledger's errors are those of whole calibrations."""
    costs = measured_overlap(0.0, 0.0)
    assert costs.measured_on is not None
    where = msgspec.structs.replace(costs.measured_on, is_cut_short=True)
    result = prediction_interval(msgspec.structs.replace(costs, measured_on=where), even_layout(4))
    assert (result.low, result.count_inside([1.0])) == (None, "")
    assert "train.recalibrate=true and a larger train.calibration_max_s" in result.describe()
