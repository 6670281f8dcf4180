"""The first lines of `evenload plan` answer what a newcomer asks: the right strategy, layout, context and warning."""

import json
import re
from pathlib import Path

import msgspec
import numpy as np
import pytest

import evenload
from commands import run
from evenload.cli.first_lines import SAME_SHARE, equally_fast
from evenload.explore.evaluate import Evaluation, StrategyResult
from evenload.report.table import MOST_COLUMNS, MOST_ROWS
from evenload.types.text import format_seconds

TABLE = Path(__file__).parents[2] / "examples" / "lengths" / "github_dirs.npy.gz"


@pytest.fixture(scope="module")
def flagship(tmp_path_factory):
    """What the README's first command prints and writes."""
    file = tmp_path_factory.mktemp("flagship") / "plan.json"
    return file, [
        *("plan", str(TABLE), "--model", "llama-7b", "--cluster", "h100x32", "--layout", "dp=4,pp=8"),
        *("--context", "16384", "--overlong", "truncate", "--documents", "512", "--json", str(file)),
    ]


def test_a_faster_layout_and_what_is_cut_off_are_in_the_first_line(flagship, capsys):
    file, arguments = flagship
    assert run(*arguments) == 0
    lines, content = capsys.readouterr().out.splitlines(), json.loads(file.read_text())
    outcome, other, warning = re.fullmatch(r"(.*? packing\.) (.*? s\.) (Warning: .*)", lines[0]).groups()
    assert re.fullmatch(
        r"Fastest with dp=4,pp=8: auto( or \w+)?, about [\d.]+ s a step \([\d.-]+ s\) in [\d.]+ GiB of 69\.5 GiB, "
        r"1\.\d\d× best-fit packing\.",
        outcome,
    )
    plain, fastest = re.fullmatch(
        r"dp=32 is faster: ([\d.]+ s); the fastest of \d+ layouts, (\S+: [\d.]+ s)\.", other
    ).groups()
    kept = r"\(--overlong split keeps them\)"
    assert re.fullmatch(rf"Warning: \d\d % of tokens are cut off by context 16K {kept}\.", warning)
    assert lines[-1] == f"next: the same with --layout {fastest.partition(':')[0]}"
    # What is said of the other layout is what planning it gives.
    here = min(row["mean_step_time_s"] for row in content["strategies"])
    where = {"model": "llama-7b", "cluster": "h100x32", "context": 16384, "overlong": "truncate", "strategy": "auto"}
    for layout, said in (("dp=32", plain), tuple(fastest.split(": "))):
        there = evenload.plan(TABLE, layout=layout, **where)["auto"]
        assert there.mean_step_time_s < here / 1.02
        assert said == format_seconds(there.mean_step_time_s)
        assert there.mean_step_time_s in [one["mean_step_time_s"] for one in content["few_layouts"]]


def test_a_table_has_few_rows_by_speed_and_few_columns_and_details_has_all(flagship, capsys):
    _, arguments = flagship
    counts = {}
    for more in ((), ("--details",)):
        assert run(*arguments, "--documents", "64", *more) == 0
        shown = capsys.readouterr().out
        rows = re.findall(r"^ [▶ ] (\w+(?: \d+K)?) +([\d.]+) (m?)s ", shown, re.M)
        counts[more] = len(rows)
        seconds = [float(number) / (1000 if milli else 1) for _, number, milli in rows]
        assert seconds == sorted(seconds)
        assert any(name.startswith("best_fit") for name, *_ in rows)
        assert ("left out of --strategy all" in shown) == bool(more)
    assert counts[()] == MOST_ROWS < counts["--details",]
    heading = next(line for line in shown.splitlines() if line.startswith(" strategy"))
    assert len(re.split(r"  +", heading.strip())) > MOST_COLUMNS


@pytest.fixture
def chats(tmp_path):
    """Lengths of chats, the longest of 2,655 tokens."""
    lengths = np.minimum(np.random.default_rng(0).lognormal(6, 0.8, 4000).astype(np.int64) + 8, 2655)
    np.save(tmp_path / "chats.npy", np.append(lengths, 2655))
    return str(tmp_path / "chats.npy")


def test_without_a_context_the_longest_document_is_it_and_everything_fits(chats):
    found = evenload.plan(chats, model="qwen3-8b", cluster="h100x8")
    assert (found.inputs["context"], found.inputs["context_from"]) == (2655, "the longest document")
    assert all(row.feasible for row in found.strategies)
    assert "cut off" not in found.headline
    assert re.match(r"Fastest with \S+ \(best of \d+ layouts\), context 2,655: auto", found.headline)


def test_the_models_limit_is_the_context_where_documents_are_longer():
    found = evenload.plan([100, 900, 50_000] * 50, model="llama3-8b", cluster="h100x8", documents=64, strategy="auto")
    assert (found.inputs["context"], found.inputs["context_from"]) == (8192, "the model's limit")
    assert re.search(r"Warning: 8\d % of tokens are cut off by context 8K \(", found.headline)


def test_a_batch_larger_than_the_data_is_said(chats):
    found = evenload.plan([100, 200, 300] * 10, model="llama3-8b", cluster="h100x8", documents=64, strategy="auto")
    assert found.headline.endswith("Warning: a batch of 64 documents is more than the data's 30.")
    assert (
        "more than the data" not in evenload.plan(chats, model="llama3-8b", cluster="h100x8", strategy="auto").headline
    )


def test_a_layout_is_chosen_that_fits_and_no_layout_within_two_percent_is_plainer():
    """70B on 64 GPUs at 128K: the shallowest layout that holds the weights holds no batch."""
    lengths = np.append(np.full(600, 3000), [131_072, 90_000, 60_000])
    found = evenload.plan(
        lengths, model="llama3-70b", cluster="h100x64", context="128k", documents=128, strategy="auto"
    )
    first, *others = found.few_layouts.compared
    assert found.best == "auto"
    assert {axis: first.layout[axis] for axis in ("dp", "cp", "pp", "tp")} == found["auto"].layout
    for other in others:
        assert first.mean_step_time_s <= other.mean_step_time_s * 1.02


def test_a_layout_that_does_not_fit_names_one_that_does(capsys, tmp_path):
    np.save(tmp_path / "a.npy", np.append(np.full(600, 3000), [131_072, 90_000]))
    arguments = ["plan", str(tmp_path / "a.npy"), "--model", "llama3-70b", "--cluster", "h100x64", "--context", "128k"]
    assert run(*arguments, "--documents", "128", "--layout", "dp=64", "--strategy", "auto") == 3
    lines = capsys.readouterr().out.splitlines()
    named = re.match(r"No strategy fits memory with dp=64\. (\S+) fits: [\d.]+ s\.", lines[0])[1]
    assert lines[-1] == f"next: the same with --layout {named}"
    assert run(*arguments, "--documents", "128", "--layout", named, "--strategy", "auto") == 0


def test_where_nothing_fits_the_search_is_next(capsys, tmp_path):
    np.save(tmp_path / "a.npy", np.full(64, 4096, np.int64))
    arguments = ["plan", str(tmp_path / "a.npy"), "--model", "llama-70b", "--cluster", "h100x8", "--documents", "8"]
    assert run(*arguments, "--layout", "pp=8", "--strategy", "balanced") == 3
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "No strategy fits memory with pp=8."
    assert lines[-1].startswith("next: --search-layout tries every layout")


def test_of_an_engine_the_first_sentence_is_its_own_and_says_what_is_not_known(chats):
    found = evenload.plan(chats, model="qwen3-8b", cluster="h100x8", documents=64, engine="trainer")
    held = r"122 GiB of weights, gradients and moments \(61.0 GiB if all are bfloat16\): train LoRA, .*"
    start = rf"On trainer every GPU of 69.5 GiB holds {held}\. By time alone (.*?), about [\d.]+ m?s a step\. "
    first = re.match(start, found.headline)
    results = {one.name: one.mean_step_time_s for one in found.engine.results if not one.why}
    near = [name for name, seconds in results.items() if seconds <= 1.05 * min(results.values())]
    named = re.split(", | or ", first[1])
    assert named[0] == "auto", "which is what the loader does where nothing is set"
    assert set(named) <= {*near, f"{len(near) - 3} others"}
    sharded = evenload.plan(chats, model="qwen3-8b", cluster="h100x8", documents=64, engine="fsdp2")
    small = evenload.plan(chats, model="qwen3-0.6b", cluster="h100x8", documents=64, engine="trainer").headline
    assert re.match(r"Fastest on trainer: auto, .* a step; every GPU holds [\d.]+ GiB of .*, of 69\.5 GiB\.", small)
    assert re.match("Fastest on fsdp2: .* if memory suffices, which is not predicted\\.", sharded.headline)
    assert sharded.next_step == 'next: PackedLoader(..., engine="fsdp2"), whose strategy is auto (docs/loader.md)'
    shown = str(found)
    assert shown.index("on trainer (") < shown.index("▶ auto"), "its own table is the first"
    assert found.next_step == "next: PackedTrainer or PackedSFTTrainer, whose strategy is auto (docs/loader.md)"


def test_without_a_tokeniser_tokens_are_estimated_and_that_is_said(tmp_path):
    (tmp_path / "a.txt").write_text("word " * 4_000)
    where = {"model": "qwen3-8b", "cluster": "h100x8", "documents": 1, "strategy": "auto"}
    found = evenload.plan(str(tmp_path), **where)
    assert found.unit == "tokens"
    assert (found.inputs["context"], found.inputs["context_from"]) == (5_001, "the longest document")
    assert found.headline.endswith("Warning: tokens are estimated, 4 bytes each: --tokenizer FOLDER counts them.")
    given = evenload.plan([5_001], **where)
    assert [row.step_time_s for row in given.strategies] == [row.step_time_s for row in found.strategies]
    counted = evenload.plan(str(tmp_path), tokenizer="bytes", **where)
    assert (counted.unit, counted.inputs["context"]) == ("bytes", 20_001)


def test_the_next_command_is_whole(chats, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.md").write_text("word " * 100)
    found = evenload.plan("a.md", model="llama3.2-1b", cluster="h100x1", documents=1, strategy="auto")
    assert found.next_step.startswith("next: evenload init --model llama3.2-1b --data a.md --gpus h100x1 writes")
    assert "--data" not in evenload.plan(chats, model="llama3.2-1b", cluster="h100x1", strategy="auto").next_step


def row(name, seconds, **more):
    return StrategyResult(
        name=name, feasible=seconds is not None, why="", mean_step_time_s=seconds, lower_bound_s=1.0,
        dropped_tokens=0, layout={}, **more,
    )  # fmt: skip


def test_strategies_within_the_error_of_prediction_are_named_together():
    rows = (row("wlb", 1.0), row("auto", 1.0 + SAME_SHARE), row("slimpack", 1.06), row("padded", None))
    assert [one.name for one in equally_fast(Evaluation(rows, "wlb", {}))] == ["auto", "wlb"]
    slower = tuple(msgspec.structs.replace(one, mean_step_time_s=1.2) if one.name == "auto" else one for one in rows)
    assert [one.name for one in equally_fast(Evaluation(slower, "wlb", {}))] == ["wlb"]
    assert equally_fast(Evaluation((row("padded", None),), None, {})) == ()


def test_where_packing_makes_no_difference_nobody_wins(capsys, tmp_path):
    np.save(tmp_path / "a.npy", np.full(512, 1024, np.int64))
    assert run("plan", str(tmp_path / "a.npy"), "--model", "llama3.2-1b", "--cluster", "h100x1") == 0
    shown = capsys.readouterr().out
    outcome, reason = shown.splitlines()[0].rsplit(", ", 1)
    assert re.match(r"Fastest with dp=1, context 1K: auto, .* or \d others, about .* a step ", outcome)
    assert reason == "about as fast as best-fit packing: on one device no strategy gains on it."
    assert shown.count("▶") == MOST_ROWS
