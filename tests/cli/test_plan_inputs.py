"""What `evenload plan` and `evenload lengths` are given: checked before anything is read, and called what it is."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from commands import MODEL, refused, run
from evenload.cli.options import parse_tokens
from evenload.data import hub
from evenload.data.tokenize import train_byte_pair_tokenizer
from evenload.errors import ConfigError
from evenload.planning.strategies.registry import STRATEGIES


@pytest.fixture
def project(tmp_path: Path, monkeypatch) -> Path:
    """A model with a tokeniser, documents, and config.toml of two stages with layers 1 and 3."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(MODEL))
    train_byte_pair_tokenizer(["a document of some words "] * 20, 300, tmp_path / "model" / "tokenizer.json")
    (tmp_path / "corpus").mkdir()
    for i in range(20):
        (tmp_path / "corpus" / f"{i}.txt").write_text("a document of some words " * (1 + i % 7))
    (tmp_path / "corpus" / "notes.md").write_text("left out")
    (tmp_path / "config.toml").write_text(
        """
        [model]
        path = "model"
        random_init = true
        dtype = "float32"
        [data]
        sources = ["corpus"]
        include = ["*.txt"]
        max_document_tokens = 512
        batch_documents = 6
        overlong = "truncate"
        [parallel]
        dp = 2
        pp = 2
        stage_layers = [1, 3]
        [plan]
        memory_bytes = 2000000000
        [plan.options]
        max_pack_tokens = 1024
        policy = "replay"
        [train]
        output_dir = "run"
        steps = 5
        """
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


PLAN = ("plan", "config.toml", "--cluster", "h100x8", "--strategy", "best_fit,balanced")


def test_a_training_configuration_says_what_is_planned(project, capsys, monkeypatch) -> None:
    """Model, data, tokeniser, layout, options, context and batch; and it needs no torch once the model was read."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(project / "cache"))
    monkeypatch.setattr(hub, "_read", {})
    assert run(*PLAN) == 0, capsys.readouterr().err
    hub._read.clear()
    for name in ("torch", "transformers"):
        monkeypatch.setitem(sys.modules, name, None)
    assert run(*PLAN, "--json", "out.json") == 0, capsys.readouterr().err
    result = json.loads(Path("out.json").read_text())["inputs"]
    assert (result["model"], result["stage_layers"]) == ("model", [1, 3])
    assert result["layout"] == {"dp": 2, "cp": 1, "pp": 2, "tp": 1, "virtual": 1}
    assert (result["documents"], result["tokens"], result["context"], result["overlong"]) == (6, None, 512, "truncate")
    assert (result["policy"], result["memory_cap_bytes"]) == ("replay", 2_000_000_000)
    assert result["unit"] == "tokens"
    assert "model/tokenizer.json (BPE" in result["tokenizer"]
    assert "20 documents" in capsys.readouterr().out


def test_declared_layouts_are_those_that_strategies_change_to(project) -> None:
    """`auto` stays where none are declared."""
    ask = ("plan", "config.toml", "--cluster", "h100x8", "--strategy", "auto,flexpipe,balanced", "--steps", "2")
    assert run(*ask, "--json", "plain.json") == 0
    file = project / "config.toml"
    file.write_text(file.read_text().replace("[plan]", '[plan]\n        layouts = ["pp=1", "pp=4"]'))
    assert run(*ask, "--json", "declared.json") == 0
    plain, declared = (
        {row["name"]: row for row in json.loads(Path(name).read_text())["strategies"]}
        for name in ("plain.json", "declared.json")
    )
    assert plain["auto"]["layout_decisions"] == declared["balanced"]["layout_decisions"] == []
    for name in ("auto", "flexpipe"):
        taken = {one["layout"] for one in declared[name]["layout_decisions"]}
        assert len(declared[name]["layout_decisions"]) == 2
        assert taken <= {"dp=2 pp=2 layers=1+3", "dp=4", "pp=4"}


def test_explicit_options_win_over_the_configuration(project, capsys) -> None:
    options = ("--layout", "dp=4", "--tokens", "1k", "--context", "2k", "--overlong", "drop", "--policy", "recompute")
    assert run(*PLAN, *options, "--include", "*.md", "--tokenizer", "bytes", "--json", "out.json") == 0
    result = json.loads(Path("out.json").read_text())["inputs"]
    assert (result["layout"]["dp"], result["layout"]["pp"]) == (4, 1)
    assert (result["documents"], result["tokens"], result["context"], result["overlong"]) == (None, 1024, 2048, "drop")
    assert (result["policy"], result["unit"]) == ("recompute", "bytes")
    assert "(1 document, median 9" in capsys.readouterr().out


def test_documents_in_bytes_are_bytes_everywhere(project, capsys) -> None:
    arguments = ["--model", "model", "--cluster", "h100x8", "--layout", "dp=2", "--documents", "8"]
    arguments += ["--tokenizer", "bytes"]
    more = ["--strategy", "best_fit,padded", "--overlong", "drop", "--context", "100", "--json", "out.json"]
    assert run("plan", "corpus", *arguments, *more, "--html", "out.html") == 0
    shown = capsys.readouterr().out
    assert "counted in bytes" in shown
    assert "bytes/s" in shown
    assert "token" not in shown.replace("tokeniser", "").replace("--tokenizer", "")
    result = json.loads(Path("out.json").read_text())["inputs"]
    assert result["unit"] == "bytes"
    assert "plain bytes" in result["tokenizer"]
    page = Path("out.html").read_text()
    assert 'data-unit="bytes"' in page
    assert "bytes/s" in page
    assert "tokens/s" not in page
    more = ["--context", "50", "--overlong", "error"]
    assert "has 51 bytes, context is 50" in refused(capsys, "plan", "corpus", *arguments, *more)


def test_corrupt_records_and_record_kinds_are_asked_for(tmp_path, capsys) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "ab", "completion": "c"}\n{"prompt": \n')
    source = str(tmp_path / "a.jsonl")
    assert "a.jsonl:2" in refused(capsys, "lengths", source, "--record", "prompt_completion")
    assert run("lengths", source, "--record", "prompt_completion", "--on-corrupt", "skip") == 0
    assert "1 document, 4 bytes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--strategy", "best_fitt"], "did you mean 'best_fit'?"),
        (["--layout", "dp=2,virtal=4"], "or pp=3,devices=1+2+1; did you mean 'virtual'?"),
        (["--layout", "dp=16"], "needs 16 devices"),
        (["--context", "many"], "--context is 'many'; give a number of tokens, such as 131072 or 128k"),
        (["--known-steps", "0"], "known_steps is 0"),
        (["--window", "0"], "window is 0"),
        (["--tokenizer", "nowhere"], "tokenizer 'nowhere' is not a file"),
        (["--json", "no/such/out.json"], "cannot write no/such/out.json"),
        (["--html", "file/out.html"], "cannot write file/out.html"),
        (["--trace", "."], "cannot write ."),
        pytest.param(
            ["--emit-plan", "/proc/out.json"],
            "cannot write /proc/out.json",
            marks=pytest.mark.skipif(not Path("/proc").is_dir(), reason="no directory that nobody can write to"),
        ),
    ],
    ids=lambda value: "-".join(value).replace("/", "_") if isinstance(value, list) else "",
)
def test_what_is_wrong_is_told_before_a_document_is_read(tmp_path, monkeypatch, capsys, more, message) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    # Documents that cannot be read: any other error than the expected one means that they were.
    error = refused(capsys, "plan", "nowhere/*.jsonl", "--model", "llama-7b", "--cluster", "h100x8", *more)
    assert message in error
    assert "has no files" not in error


def test_all_says_what_it_leaves_out(tmp_path, capsys) -> None:
    np.save(tmp_path / "a.npy", np.full(50, 300, np.int64))
    arguments = ["plan", str(tmp_path / "a.npy"), "--model", "llama-7b", "--cluster", "h100x8", "--documents", "8"]
    assert run(*arguments, "--layout", "dp=2,pp=4", "--details", "--json", str(tmp_path / "out.json")) == 0
    result = json.loads((tmp_path / "out.json").read_text())
    assert {one["name"] for one in result["left_out"]} == {"skrull", "fixed_exact"}
    assert {row["name"] for row in result["strategies"]} == set(STRATEGIES) - {"skrull", "fixed_exact"}
    shown = capsys.readouterr().out
    assert "left out of --strategy all: skrull: it knows no pipeline, and layout dp=2 pp=4 has 4 stages" in shown
    assert "left out of --strategy all: fixed_exact: its solver takes up to 10 s" in shown


def test_layouts_that_fit_are_named_where_the_asked_one_does_not(tmp_path, capsys) -> None:
    np.save(tmp_path / "a.npy", np.full(50, 3000, np.int64))
    arguments = ["plan", str(tmp_path / "a.npy"), "--model", "llama-13b", "--cluster", "h100x8", "--documents", "8"]
    assert run(*arguments, "--layout", "dp=8", "--strategy", "balanced") == 3
    error = capsys.readouterr().err
    assert "no strategy fits; the closest: strategy balanced needs" in error
    assert "these fit by prediction" in error
    named = error.partition("--layout ")[2].split()[0]
    assert run(*arguments, "--layout", named, "--strategy", "balanced") == 0
    capsys.readouterr()
    few = [*arguments[:4], "--cluster", "h100x2", "--documents", "8", "--model", "llama-150b"]
    assert run(*few) == 3
    assert "optimizer alone are more than a device holds; take more devices" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("131072", 131_072), ("128k", 131_072), ("32K", 32_768), ("1M", 2**20), ("1.5k", 1536), ("4_096", 4096),
     ("131,072", 131_072), ("-5", -5)],
)  # fmt: skip
def test_token_counts_are_read_as_people_write_them(text, tokens) -> None:
    assert parse_tokens("--context", text) == tokens


@pytest.mark.parametrize("text", ["", "k", "1.5", "12x", "1.0001k", "1kk", "1e5"])
def test_other_token_counts_are_refused(text) -> None:
    with pytest.raises(ConfigError, match="--context is '"):
        parse_tokens("--context", text)


def test_every_option_of_planning_can_be_set(tmp_path, capsys) -> None:
    np.save(tmp_path / "a.npy", np.full(50, 300, np.int64))
    arguments = ["plan", str(tmp_path / "a.npy"), "--model", "llama-7b", "--cluster", "h100x8", "--documents", "8"]
    arguments += ["--layout", "dp=2,pp=4", "--strategy", "wlb", "--json", str(tmp_path / "out.json"), "--window", "3"]
    set_ = ["--set", "wlb.release=queues", "--set", "wlb.outlier_lengths=[100, 200]", "--set", "micro_batches=6"]
    assert run(*arguments, *set_, "--set", "max_pack_tokens=900") == 0
    result = json.loads((tmp_path / "out.json").read_text())
    own = result["inputs"]["strategy_options"]
    assert own["wlb"]["release"] == "queues"
    assert own["wlb"]["outlier_lengths"] == [100, 200]
    assert result["inputs"]["window"] == 3
    (row,) = result["strategies"]
    assert row["num_packs_forward"] == 8  # of single documents: fewer than 2 replicas x 6
    assert row["max_pack_tokens"] <= 900
    assert "did you mean 'plan.options.wlb.release'?" in refused(capsys, *arguments, "--set", "wlb.relase=queues")


@pytest.mark.parametrize(
    ("plan", "is_said"),
    [('layouts = ["dp=4"]', True), ('layouts = ["dp=4"]\ntwin_bytes = 0', False), ("", False)],
    ids=["copies", "everything sent", "one layout"],
)
def test_switches_of_a_cpu_run_that_were_not_measured_are_said(project, capsys, plan, is_said):
    """The run measures what its copies take; the data sheet's links know nothing of that."""
    config = Path("config.toml")
    text = config.read_text().replace("memory_bytes = 2000000000", f"memory_bytes = 2000000000\n{plan}")
    config.write_text(text)
    assert run("plan", "config.toml", "--cluster", "h100x8", "--strategy", "balanced") == 0
    assert ("cost: what a change of the layout takes was not measured" in capsys.readouterr().out) == is_said
