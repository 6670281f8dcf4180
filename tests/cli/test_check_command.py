"""`evenload check` as a user runs it: real processes at the layout of the configuration."""

import json

import pytest

from hybrid_models import hybrid_model

NAMES = ("isolation", "invariance", "resume", "ledger", "memory")

SETTINGS = """
max_document_tokens = 1024
batch_documents = 6
[parallel]
pp = 2
[train]
steps = 5
"""


def test_a_model_alone_is_asked_which_ways_of_packing_leak(tmp_path, monkeypatch, command_here):
    """Exit code 1 where one does, and the first line answers."""
    monkeypatch.setenv("COLUMNS", "400")
    hybrid_model("jamba").config.save_pretrained(tmp_path)
    code, output, _ = command_here("check", "--model", str(tmp_path))
    assert output.startswith("Leaks: JambaForCausalLM with sdpa in transformers ")
    assert "packed by position_ids, + cu_seq_lens, + seq_idx; right: a document a row\n" in output
    assert "first in model.layers.0.mamba (JambaMambaMixer)" in output
    assert code == 1
    code, output, _ = command_here("check", "--model", "qwen2.5-0.5b", "--attention", "eager")
    assert output.startswith("No leak: Qwen2ForCausalLM with eager")
    assert code == 0


def test_a_model_that_is_no_causal_decoder_is_named(tmp_path, command_here):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5"}))
    code, _, errors = command_here("check", "--model", str(tmp_path))
    assert "t5 is no causal language model of transformers" in errors
    assert code == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "either a CONFIG.toml or --model"),
        (("config.toml", "--model", "qwen2.5-0.5b"), "either a CONFIG.toml or --model"),
        (("--model", "nothing-there"), "no config.json there"),
        (("--model", "qwen2.5-0.5b", "--attention", "none"), "--attention none: "),
    ],
)
def test_what_cannot_be_checked_is_named(command_here, words, message):
    code, _, errors = command_here("check", *words)
    assert message in errors
    assert code == 2


@pytest.mark.long
def test_a_right_run_passes_and_nothing_is_written(small_project, monkeypatch, command_here):
    """And the one thing that does not fit is told apart: exit code 3, all else proved."""
    monkeypatch.setenv("COLUMNS", "400")
    project = small_project(SETTINGS, pp=2)
    code, output, errors = command_here("check", "config.toml", "plan.memory_bytes=300000", "train.cost_file=cost.json")
    rows = [line.split() for line in output.splitlines()]
    verdicts = {row[0]: row[1] for row in rows if len(row) > 1 and row[0] in NAMES}
    assert verdicts == {**dict.fromkeys(NAMES, "pass"), "memory": "fail"}, output
    assert code == 3
    assert "failed: memory" in output
    assert not (project / "run").exists()
    assert "Traceback" not in output + errors
