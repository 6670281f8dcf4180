"""`evenload plan` on a file of groups: what sharing prefixes saves, and what it costs in memory."""

import json

import numpy as np
import pytest

import evenload
from commands import run
from evenload.errors import ConfigError

READ = {"model": "llama-7b", "cluster": "h100x8", "record": "tokens", "set_options": ["candidates=4"]}
WHERE = READ | {"layout": "dp=2,pp=4"}


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.fixture(scope="module")
def groups():
    """Six prompts of 1,500 tokens with eight answers each."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 1000, 1500).tolist() for _ in range(6)]
    return [[prompt + rng.integers(0, 1000, int(n)).tolist() for n in rng.integers(50, 400, 8)] for prompt in prompts]


def test_savings_are_the_difference_of_two_plans(groups, tmp_path):
    trees = write(tmp_path / "groups.jsonl", [{"input_ids": group} for group in groups])
    flat = write(tmp_path / "flat.jsonl", [{"input_ids": sequence} for group in groups for sequence in group])
    found = evenload.plan(trees, **WHERE, documents=6, context=8192, strategy="balanced")
    alone = evenload.plan(flat, **WHERE, documents=48, context=8192, strategy="balanced")
    savings = found.savings
    assert savings.shared == found["balanced"]
    assert savings.path_tokens == sum(len(sequence) for group in groups for sequence in group)
    assert savings.unique_tokens == savings.path_tokens - 6 * 7 * 1500
    assert savings.alone.mean_step_time_s == pytest.approx(alone["balanced"].mean_step_time_s, rel=0.02)
    assert savings.alone.peak_memory_bytes == pytest.approx(alone["balanced"].peak_memory_bytes, rel=0.02)
    assert savings.speedup == savings.alone.mean_step_time_s / found["balanced"].mean_step_time_s > 2
    assert f"Shared prefixes: {savings.speedup:.2f}× the speed of the sequences one by one" in found.headline
    assert f"{savings.unique_tokens:,} tokens are computed for {savings.path_tokens:,}" in found.headline
    assert json.loads(found.to_json())["shared_prefixes"]["speedup"] == savings.speedup
    assert alone.savings is None
    assert "shared_prefixes" not in json.loads(alone.to_json())


def test_all_are_strategies_that_plan_trees(groups, tmp_path):
    trees = write(tmp_path / "groups.jsonl", [{"input_ids": group} for group in groups])
    found = evenload.plan(trees, **WHERE, documents=6)
    planned = {row.name for row in found.strategies}
    assert {"auto", "slimpack", "balanced", "best_fit"} <= planned
    assert all(row.feasible for row in found.strategies)
    left_out = {one.name for one in found.left_out if "trees of shared prefixes" in one.why}
    assert left_out >= {"wlb", "flexpipe", "padded"}
    named = evenload.plan(trees, **WHERE, documents=6, strategy="balanced,wlb")
    assert "wlb does not plan trees" in named["wlb"].why
    with pytest.raises(ConfigError, match=r"--engine trainer: .* share prefixes"):
        evenload.plan(trees, **WHERE, documents=6, engine="trainer")


def test_records_of_one_group_are_a_tree(groups, tmp_path):
    rows = [{"input_ids": sequence, "prompt": at} for at, group in enumerate(groups) for sequence in group]
    flat = write(tmp_path / "flat.jsonl", rows)
    trees = write(tmp_path / "groups.jsonl", [{"input_ids": group} for group in groups])
    one = evenload.plan(flat, **READ, documents=6, strategy="balanced", group_by="prompt")
    other = evenload.plan(trees, **READ, documents=6, strategy="balanced")
    for name in ("unique_tokens", "path_tokens", "recomputed_tokens", "speedup"):
        assert getattr(one.savings, name) == getattr(other.savings, name) is not None
    assert "--group-by prompt" in one.next_step
    assert "--engine" not in one.next_step, "no engine trains trees"


def test_tokens_that_are_cut_off_are_told(groups, tmp_path):
    """As of plain records: of every path."""
    trees = write(tmp_path / "groups.jsonl", [{"input_ids": group} for group in groups])
    found = evenload.plan(trees, **WHERE, documents=6, context=1600, strategy="slimpack")
    lost = sum(max(0, len(sequence) - 1600) for group in groups for sequence in group)
    assert sum(batch.dropped_tokens for batch in found.batches) == lost
    share = lost / sum(len(sequence) for group in groups for sequence in group)
    assert f"Warning: {100 * share:.0f} % of tokens are cut off by context 1,600" in found.headline
    drop = evenload.plan(trees, **WHERE, documents=6, context=1800, strategy="slimpack", overlong="drop")
    longer = sum(len(sequence) for group in groups for sequence in group if len(sequence) > 1800)
    assert sum(batch.dropped_tokens for batch in drop.batches) == longer


def test_lengths_and_init_count_sequences(groups, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trees = write(tmp_path / "groups.jsonl", [{"input_ids": group} for group in groups])
    assert run("lengths", trees, "--json", "lengths.json") == 0
    assert "48 documents" in capsys.readouterr().out
    profile = json.loads((tmp_path / "lengths.json").read_text())
    longest = max(len(sequence) for group in groups for sequence in group)
    assert (profile["documents"], profile["longest"]) == (48, longest)
    rows = [{"text": "x" * 80 + "y" * n, "prompt": 3} for n in range(1, 5)]
    write(tmp_path / "rows.jsonl", rows)
    model = str(tmp_path / "model")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(MODEL))
    assert run("init", "--model", model, "--data", "rows.jsonl", "--group-by", "prompt", "--gpus", "0") == 0
    written = (tmp_path / "config.toml").read_text()
    assert 'group_by = "prompt"' in written
    assert "max_document_tokens = 91 " in written, "the whole tree, each answer with its end"
    assert "max_tree_tokens" not in written
    again = ("init", "--model", model, "--data", "rows.jsonl", "--group-by", "prompt", "--gpus", "0")
    assert run(*again, "--context", "85", "--record", "text", "--out", "short.toml") == 0
    written = (tmp_path / "short.toml").read_text()
    assert "max_document_tokens = 85 " in written
    assert "max_tree_tokens = 91 " in written
    assert 'record = "text"' in written


MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 300,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
}


def test_replicas_share_a_tree_that_is_too_large_for_one(groups, tmp_path):
    rng = np.random.default_rng(1)
    large = [groups[0][0][:100] + rng.integers(0, 1000, 900).tolist() for _ in range(12)]
    trees = write(tmp_path / "groups.jsonl", [{"input_ids": large}, {"input_ids": groups[1][:1]}])
    found = evenload.plan(trees, **WHERE, documents=2, context=16384, strategy="balanced,slimpack", worst=1)
    for name in ("balanced", "slimpack"):
        (plan,) = found.plans(name)
        assert len(plan.documents) == 3, "the tree in two parts"
        assert found[name].imbalance_dp < 1.2, "12 answers cannot be dealt more evenly; the whole tree would be 1.7"
    assert found.savings.recomputed_tokens == 100
    assert found.savings.unique_tokens == 100 + 12 * 900 + 100 + len(groups[1][0])
    assert found.worst[0].documents == 3


def test_a_run_has_a_limit_of_its_own_for_trees(groups, tmp_path, capsys):
    write(tmp_path / "groups.jsonl", [{"input_ids": group} for group in groups])
    settings = {"max_document_tokens": 2048, "max_tree_tokens": 6000, "batch_documents": 6}
    lines = [
        "[model]",
        'path = "llama-7b"',
        "random_init = true",
        "[train]",
        "steps = 1",
        'output_dir = "run"',
        "[data]",
    ]
    lines += [f"sources = {json.dumps([str(tmp_path / 'groups.jsonl')])}", 'record = "tokens"']
    config = tmp_path / "config.toml"
    config.write_text("\n".join([*lines, *(f"{name} = {value}" for name, value in settings.items())]))
    where = {"cluster": "h100x8", "layout": "dp=2,pp=4", "strategy": "slimpack", "set_options": ["candidates=4"]}
    whole = evenload.plan(str(config), **where).savings
    assert whole.path_tokens == sum(len(sequence) for group in groups for sequence in group)
    config.write_text(config.read_text().replace("6000", "2048"))
    cut = evenload.plan(str(config), **where).savings
    assert cut.recomputed_tokens > whole.recomputed_tokens
    found = evenload.plan(str(config), **where)
    again = f"{cut.recomputed_tokens:,} of them again because trees were cut (data.max_tree_tokens)"
    assert again in found.headline
    assert "unique ones, and" in " ".join(found.remarks)
    assert run("lengths", str(config)) == 0
    assert "48 documents" in capsys.readouterr().out
