"""The sweep over transformers' causal types says what is equal, what is refused, and what is wrong."""

import json

import pytest

import sweep_decoders
from sweep_decoders import _compared, page_of, read_rows


@pytest.mark.parametrize(
    ("model_type", "result"),
    [("qwen3", "cut"), ("gpt_oss", "cut"), ("lfm2", "cut"), ("minimax", "whole"), ("bart", "refused")],
)
def test_a_type_is_compared_as_its_layers_allow(model_type, result):
    row = _compared(model_type)
    assert row["class"] == result, row
    assert ("error" in row) == (result != "refused")
    assert bool(row.get("probe")) == (result == "whole")


def test_a_gradient_that_is_off_is_wrong(monkeypatch):
    plain = sweep_decoders._replayed

    def spoilt(*args, **kwargs):
        loss, gradients = plain(*args, **kwargs)
        gradients["model.norm.weight"].mul_(1 + 1e-8)
        return loss, gradients

    monkeypatch.setattr(sweep_decoders, "_replayed", spoilt)
    row = _compared("qwen3")
    assert row["class"] == "WRONG"
    assert row["why"] == "model.norm.weight is off by 1e-08"


def test_the_newest_row_of_a_type_counts(tmp_path):
    file = tmp_path / "rows.jsonl"
    rows = [{"type": "a", "class": "FAILS", "why": "x|y"}, {"type": "b", "class": "cut", "error": 1e-15}]
    file.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"type": "a", "class": "refused", "why": "z|"}]))
    page = page_of(read_rows(file))
    assert "| `b` | cut |  | 1e-15 |  |\n| `a` | refused |  |  | z/ |" in page
    assert "not ours" not in page
