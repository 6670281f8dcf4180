"""benchmarks/gpu_training.py and its plain loop, on the CPU: they train the same, and what was measured stays."""

import functools
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

import plain_loop

ROOT = Path(__file__).resolve().parents[2]
LENGTHS = [300, 40, 512, 90, 120, 33, 512, 16, 250, 77, 64, 400]
TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 300, "tie_word_embeddings": True}  # fmt: skip


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gpu_training

    return gpu_training


@pytest.fixture
def session(benchmark, tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "runs").mkdir()
    return benchmark.Session(time.monotonic() + 120, tmp_path / "kept", tmp_path / "runs", "cpu")


@pytest.fixture
def case(benchmark):
    return benchmark.Case("a card, tiny", Qwen3Config(**TINY), LENGTHS, 6)


@pytest.mark.parametrize("seed", range(5))
def test_documents_are_packed_as_trl_packs_them(seed):
    import pyarrow as pa
    from trl.data_utils import _pack_bfd

    lengths = np.random.default_rng(seed).integers(1, 4097, 200).tolist()
    table = pa.table({"input_ids": pa.array([[0] * n for n in lengths])})
    theirs = _pack_bfd(table, 4096).column("seq_lengths").to_pylist()
    ours = plain_loop.best_fit_decreasing(lengths, 4096)
    # Of windows with the same room any may come first.
    assert sorted(sum(lengths[i] for i in one) for one in ours) == sorted(map(sum, theirs))
    assert sorted(i for one in ours for i in one) == list(range(200))


@pytest.mark.parametrize("batches", [plain_loop.packed, plain_loop.rebalanced])
def test_micro_batches_hold_every_document_of_a_step_once(batches):
    lengths = np.random.default_rng(0).integers(16, 4097, 96).tolist()
    made = batches(lengths)
    assert sorted(i for one in made for i in one) == list(range(96))
    assert len(made) == len(plain_loop.packed(lengths))


@pytest.mark.parametrize("asks_for_groups", [True, False], ids=["torch 2.13", "torch 2.11"])
def test_attention_stays_inside_documents_and_gets_what_torch_asks_for(monkeypatch, asks_for_groups):
    """transformers hands the edges of documents to a function of ours. torch's has a kernel for GPUs only; in its place
    stands what its documentation says. The loss is that of sdpa."""

    def older(query, key, value, cu_q, cu_k, max_q, max_k, *, scale, window_size):
        assert window_size == (-1, 0)
        assert torch.equal(cu_q, cu_k)
        assert max_q == max_k == int(cu_q.diff().max())
        attend = functools.partial(
            torch.nn.functional.scaled_dot_product_attention, is_causal=True, scale=scale, enable_gqa=True
        )
        cut = zip(*(one.transpose(0, 1).split(cu_q.diff().tolist(), dim=1) for one in (query, key, value)), strict=True)
        return torch.cat([attend(*parts) for parts in cut], dim=1).transpose(0, 1)

    def newer(*given, enable_gqa, **settings):
        assert enable_gqa
        return older(*given, **settings)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", newer if asks_for_groups else older)
    plain_loop.AttentionInterface.register("torch_varlen", plain_loop.packed_attention)
    documents = [np.random.default_rng(n).integers(0, 300, n) for n in (30, 7, 50)]
    batch = plain_loop.batch_of(documents, is_packed=True)
    losses = []
    for attention in ("torch_varlen", "sdpa"):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(Qwen3Config(**TINY), attn_implementation=attention)
        given = batch if attention == "torch_varlen" else {k: batch[k] for k in ("input_ids", "labels", "position_ids")}
        losses.append(model(**given, use_cache=False, num_items_in_batch=84).loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.long
def test_plain_loops_and_evenload_train_the_same(benchmark, session, case):
    """The same weights, documents and updates: equal losses step by step, by two ways of packing and by ours."""
    rows = {}
    for name, options in {"packed": ("--batches=packed",), "rebalanced": ("--batches=rebalanced",)}.items():
        rows[name] = list(session.plain(case, name, *options, "--dtype=float32"))
    overrides = (*benchmark.AS_PLAIN, "model.dtype=float32", "train.threads_per_process=1")
    rows["evenload"] = list(session.evenload(case, "evenload", *overrides))
    assert session.failed == []
    for name, of_run in rows.items():
        metrics = session.kept / f"a card, tiny, {name}.jsonl"
        assert len(benchmark._steps_in(metrics)) == 2
        assert {row.metric for row in of_run} >= {f"{name}: rate", f"{name}: loss"}
    losses = [next(row.value for row in of_run if row.metric.endswith("loss")) for of_run in rows.values()]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-4)
    assert [row for row in rows["evenload"] if row.baseline == "predicted"]


WRITES = """
import sys, time
for _ in range({steps}):
    open(sys.argv[1], "a").write('{{"tokens": 8, "step_time_s": 2.0, "peak_memory_bytes": 2147483648, "loss": 1.0}}\\n')
{then}
"""


@pytest.mark.parametrize(
    ("steps", "then", "metrics", "failed"),
    [
        pytest.param(2, "time.sleep(60)", 3, "", id="ended when it has done its steps"),
        pytest.param(1, "time.sleep(60)", 0, "1 of 2 steps", id="stopped"),
        pytest.param(0, "sys.exit(1)", 0, "0 of 2 steps, exit code 1", id="failed"),
        pytest.param(0, "sys.exit(3)", 1, "", id="does not fit"),
    ],
)
def test_steps_that_were_done_in_time_count(session, case, tmp_path, steps, then, metrics, failed):
    session.deadline_s = time.monotonic() + (2 if failed.startswith("1") else 30)
    path = tmp_path / "metrics.jsonl"
    command = (sys.executable, "-c", WRITES.format(steps=steps, then=then), str(path))
    rows = list(session._rows(case, "a run", command, path))
    assert len(rows) == metrics
    assert ([] if not failed else [True]) == [failed in one for one in session.failed]
    assert (session.kept / "a card, tiny, a run.jsonl").exists() == (steps > 0)
    if then == "sys.exit(3)":
        assert rows[0].metric == "a run: does not fit"
    elif rows:
        assert {row.metric: row.value for row in rows}["a run: rate"] == 4.0


def test_every_part_asks_for_runs_that_its_models_and_cards_hold(benchmark, monkeypatch):
    """Names of models, lengths, policies: what `evenload train` is asked for, without running it."""
    asked = []
    session = SimpleNamespace(
        evenload=lambda case, name, *words: asked.append((case, name, words)) or (),
        plain=lambda case, name, *words: asked.append((case, name, words)) or (),
    )
    for part in (benchmark.peers, benchmark.document, benchmark.long):
        assert list(part(session, "NVIDIA H100 80GB HBM3")) == []
    cases = {case.name: case for case, _, _ in asked}
    assert len(cases) == 2 + len(benchmark.LONG)
    for case in cases.values():
        assert len(case.lengths) % case.documents == 0
        assert case.config.max_position_embeddings >= max(case.lengths)
        # In bf16 with fp32 masters, gradients and moments; what one step takes at a third of the card's peak.
        assert benchmark.spec_of(case.config, "a", 2).num_parameters * 18 < 70e9
        assert case.flops(0) / 330e12 < 60
    mean = np.mean(cases["NVIDIA H100 80GB HBM3, Qwen3-1.7B, trl#6092"].lengths)
    assert 1200 < mean < 1500


def test_measured_rows_say_what_share_of_the_card_a_run_reached(benchmark, case):
    step = {"tokens": 100, "step_time_s": 0.5, "peak_memory_bytes": 2**31, "loss": 2.0}
    step |= {"predicted_peak_memory_bytes": 2**30, "predicted_step_time_s": 1.0}
    card = benchmark.Case("NVIDIA H100 80GB HBM3, tiny", case.config, case.lengths, 6)
    rows = {row.metric: row for row in benchmark.rows_of(card, "run", [{"step_time_s": 9.0} | step, step])}
    assert rows["run: rate"].value == 200
    assert rows["run: MFU of the data sheet"].value == pytest.approx(card.flops(1) / 0.5 / 989e12)
    assert rows["run: peak_memory_bytes"].value == 2
    assert rows["run: step_time_s"].value == 0.5
