import math

import pytest

from evenload.types.text import (
    MISSING,
    format_bytes,
    format_change,
    format_count,
    format_interval,
    format_layout,
    format_percent,
    format_plain,
    format_ratio,
    format_seconds,
)

SHOWN = {
    format_seconds: {
        0.0: "0 s", 0.0123: "12.3 ms", 0.9996: "1.00 s", 1.234: "1.23 s", 12.34: "12.3 s", 123.4: "123 s",
        4321.0: "4321 s", 2.5e-6: "2.50 µs", -0.5: "-500 ms", math.inf: "inf",
    },
    format_interval: {
        (1.82, 2.84): "1.82-2.84 s", (0.9, 1.15): "0.90-1.15 s", (90.0, 140.0): "90.0-140 s",
        (0.0123, 0.0456): "12.3-45.6 ms", (0.0, 0.0456): "0 s - 45.6 ms", (1.0, math.inf): "1.00 s - inf",
    },
    format_bytes: {0: "0 B", 512: "512 B", 1610612736: "1.50 GiB", 80 * 2**30: "80.0 GiB", 2**40 - 1: "1.00 TiB"},
    format_count: {0: "0", 999: "999", 999.9: "1.00K", 131072: "131K", 8_112_340: "8.11M"},
    format_percent: {0.0734: "7.3 %"},
    format_change: {-0.0541: "-5.4 %", 0.02: "+2.0 %"},
    format_ratio: {1.0412: "1.041"},
    format_layout: {"dp=8,pp=4": "dp=8,pp=4"},
}  # fmt: skip


@pytest.mark.parametrize("function", SHOWN, ids=lambda function: function.__name__)
def test_numbers_have_three_digits_and_a_fitting_unit(function):
    assert {value: function(value) for value in SHOWN[function]} == SHOWN[function]


def test_a_missing_value_never_looks_like_zero_and_a_diverged_loss_is_shown():
    for function in (format_bytes, format_count, format_seconds, format_percent, format_change, format_ratio):
        assert function(None) == function(math.nan) == MISSING
    assert format_plain(None, ".4f") == MISSING
    assert format_layout(None) == MISSING
    assert [format_plain(value, ".4f") for value in (math.nan, math.inf)] == ["nan", "inf"]


def test_a_layout_names_its_dimensions_in_one_order():
    assert format_layout({"tp": 1, "dp": 8, "pp": 4, "cp": 2}) == "dp=8 pp=4 cp=2 tp=1"
