"""What a run prints: what is on, the first plan, and how well predictions held."""

import itertools
from io import StringIO
from types import SimpleNamespace

import msgspec
import pytest
from rich.console import Console

from evenload.cli.run_lines import StepLines, data_line, first_plan_line, interval_line, prediction_line, strategy_line
from evenload.data.config import DataConfig
from evenload.explore.prediction_interval import PredictionInterval
from evenload.planning.strategies.registry import STRATEGIES
from evenload.report.run_files import METRIC_KEYS
from evenload.types.text import format_seconds
from evenload.types.tree import Segment
from plan_building import random_plan

INTERVAL = PredictionInterval(low=0.9, high=1.2, basis="a ledger")


def test_every_strategy_says_what_it_does():
    assert all(strategy_line(name, 1) == f"strategy {name}: {one.description}" for name, one in STRATEGIES.items())
    assert "2 ranks share" in strategy_line("skrull", 2)
    assert strategy_line("slimpack", 1, "replicas share documents").endswith("by simulation; replicas share documents")


def test_the_data_line_names_what_decides_order_speed_and_loss_of_tokens():
    config = DataConfig(sources=("a",), batch_documents=64, max_document_tokens=4096, overlong="drop", seed=7)
    line = data_line(config, 1200, 3_500_000)
    for words in (
        "1,200 files of 3.5 MB", "1,024 documents in 16 streams, seed 7", "trains 64 documents", "4,096 tokens",
        "left out (ledger: overlong)", "1 worker process a rank", "2 steps ahead",
    ):  # fmt: skip
        assert words in line
    plain = DataConfig(
        sources=("a",), batch_tokens=10_000, max_document_tokens=8, shuffle_window=1, workers=0, prefetch_steps=0
    )
    line = data_line(plain, 1, 0)
    assert "held out" not in line
    held_out = DataConfig(sources=("a",), batch_documents=64, max_document_tokens=4096, held_out_share=0.01)
    assert "seed 0, 0.01 of the documents held out for validation | a step" in data_line(held_out, 1200, 3_500_000)
    for words in ("in the order of the files", "10,000 tokens", "read by a thread", "data.prefetch_steps = 0"):
        assert words in line


def test_the_first_plan_line_counts_real_tokens_cuts_and_packs():
    plan = random_plan(3, num_layers=4, pp=2, dp=2)
    line = first_plan_line(plan, 64, INTERVAL)
    tokens = sum(document.num_tokens for document in plan.documents)
    forward = sum(len(replica.forward) for replica in plan.pack_plans)
    cut = {piece.doc_id for r in plan.pack_plans for pack in r.forward for piece in pack.slices if piece.start}
    assert f"{len(plan.documents)} documents of {tokens} tokens in {forward} forward" in line
    assert f"{len(cut)} documents cut, 0 shared" in line
    assert "100.0% of computed tokens are real" in line
    assert "(limit 64)" in line
    assert f"predicted {format_seconds(plan.predicted.step_time_s)}; 90 % interval of step times: 0.90 to 1.20" in line
    assert line.endswith("times the predicted (a ledger)")
    first, *others = plan.documents
    tree = msgspec.structs.replace(
        first, segments=(Segment(first.num_tokens, -1),), num_path_tokens=first.num_tokens + 9
    )
    line = first_plan_line(msgspec.structs.replace(plan, documents=(tree, *others)), 64, INTERVAL)
    assert f" of {tokens} tokens, for {tokens + 9} of sequences that share prefixes, in {forward} forward" in line


def test_a_run_ends_with_how_well_its_predictions_held():
    assert interval_line([], INTERVAL, 0.0) == ""
    line = interval_line([0.9, 1.0, 1.3, 1.2], INTERVAL, 0.0)
    assert line.startswith(
        "steps after the first took 1.10 times their predicted time; 3 of 4 lie in the 90 % interval"
    )
    assert line.endswith("of 0.90 to 1.20 times")
    busy = interval_line([0.9, 1.0, 1.3, 1.2], INTERVAL, 0.4)
    assert "1.10 times their predicted time on a busy machine: other programs held cores" in busy
    assert "for 40% of the time" in busy
    assert "of 4" not in busy
    assert "90 %" not in busy


def shown_steps(total, steps_done=0, every_s=3600.0, num_steps=30):
    console = Console(file=StringIO(), width=200)
    lines = StepLines(console, every_s, steps_done, total)
    with lines.moving():
        for step in range(steps_done, min(steps_done + num_steps, total or 10**6)):
            lines.show(dict.fromkeys(METRIC_KEYS) | {"step": step}, step + 1)
    return [int(line.split()[1]) for line in console.file.getvalue().splitlines() if line.startswith("step ")]


def test_every_step_has_a_line_where_there_are_few():
    assert shown_steps(20) == list(range(20))
    assert shown_steps(21) == [0, 1, 20]
    assert shown_steps(1010, steps_done=1000) == list(range(1000, 1010)), "few are left"
    assert shown_steps(None) == [*range(20), 29], "how many there are is not known"
    assert shown_steps(1000, every_s=0.0) == list(range(30))


def test_steps_that_take_as_long_as_lines_are_apart_all_have_one(monkeypatch):
    now = itertools.count(step=10.0)
    monkeypatch.setattr("evenload.cli.run_lines.time", SimpleNamespace(monotonic=lambda: next(now)))
    assert shown_steps(1000, every_s=10.0) == list(range(30))


@pytest.mark.parametrize(
    ("ratios", "words"),
    [((0.66, 0.7, 0.68), ("0.68 times", "was busier when")), ((1.5, 2.0, 1.3), ("1.50 times", "busier or slower now"))],
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
