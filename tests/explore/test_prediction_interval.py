"""Which interval a prediction carries, and what it says of itself."""

import msgspec
import pytest

from cost_samples import sample_coefficients
from evenload.explore import prediction_interval as intervals
from evenload.explore.prediction_interval import (
    ANY_LAYOUT,
    KindInterval,
    encode_intervals,
    layout_kind,
    ledger_intervals,
    prediction_interval,
)
from evenload.types.layout import even_layout

CPU = sample_coefficients(device="AMD EPYC, 1 thread a process")
OF_ALL = KindInterval(processor="cpu", layout=ANY_LAYOUT, low=0.9, high=1.2, rows=90, cases=9)
OF_PIPELINES = KindInterval(processor="cpu", layout="pp", low=0.95, high=1.05, rows=50, cases=5)


@pytest.fixture
def ledger(monkeypatch):
    def hold(*found):
        monkeypatch.setattr(intervals, "ledger_intervals", lambda: found)

    return hold


def test_data_sheets_carry_the_largest_published_error_and_say_so():
    found = prediction_interval(sample_coefficients(source="analytic"), even_layout(4))
    assert (found.low, found.high) == (pytest.approx(1 / 1.218), pytest.approx(1 / 0.782))
    assert "from published errors of comparable simulators, not from our ledger" in found.describe()
    # A prediction of 1 s at either end is off by just that error.
    assert [1 / seconds - 1 for seconds in found.of(1.0)] == [pytest.approx(0.218), pytest.approx(-0.218)]


def test_measured_costs_carry_the_ledgers_interval_of_their_layout(ledger):
    ledger(OF_ALL, OF_PIPELINES)
    of_pipeline, of_replicas = (prediction_interval(CPU, even_layout(4, **axes)) for axes in ({"pp": 2}, {"dp": 2}))
    assert of_pipeline.of(2.0) == (1.9, 2.1)
    assert of_replicas.of(2.0) == (1.8, 2.4)
    assert "pp: 50 rows of 5 cases in docs/accuracy.md" in of_pipeline.describe()


def test_measured_costs_without_rows_say_so(ledger):
    ledger()
    found = prediction_interval(CPU, even_layout(4))
    assert "measured costs of a CPU, too few rows in docs/accuracy.md: from published errors" in found.basis
    assert found.low == pytest.approx(1 / 1.135)


def test_rows_of_cpus_do_not_speak_for_gpus(ledger):
    ledger(OF_ALL, OF_PIPELINES)
    found = prediction_interval(sample_coefficients(device="NVIDIA H100 80GB HBM3"), even_layout(4, pp=2))
    assert "measured costs of a GPU, too few rows in docs/accuracy.md: from published errors" in found.basis


def test_kinds_of_layouts_are_named_by_their_dimensions():
    assert layout_kind(even_layout(4)) == "one device"
    assert layout_kind(even_layout(4, dp=2, cp=3, pp=4, tp=8)) == "dp cp pp tp"


def test_the_file_reads_back():
    encoded = encode_intervals((OF_ALL, OF_PIPELINES))
    assert msgspec.json.decode(encoded, type=tuple[KindInterval, ...]) == (OF_ALL, OF_PIPELINES)
    assert encode_intervals(()) == b"[]\n"
    assert all(0 < one.low <= one.high for one in ledger_intervals())
