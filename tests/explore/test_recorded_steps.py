"""Recorded steps: read and checked line by line, and both divisions priced alike."""

import gzip
import json
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from evenload.cost.analytic import analytic_coefficients
from evenload.cost.pack_cost import PackCosts
from evenload.data.hub import model_from
from evenload.data.lengths import read_length_table
from evenload.errors import ConfigError, DataError
from evenload.explore.recorded_steps import Partition, RecordedStep, fitted_cost, judge_steps, read_steps
from evenload.plan.micro_batches import Cost, micro_batches
from evenload.types.cluster import cluster_of
from evenload.types.layout import even_layout
from page_blocks import ROOT

A_SECOND_A_TOKEN = Cost(linear_s=1.0, quadratic_s=0.0, micro_batch_s=0.5)


def priced(ranks, cost=A_SECOND_A_TOKEN):
    """Costs that the tests can compute by hand."""
    return SimpleNamespace(
        layout=SimpleNamespace(dp=ranks), pack_constant_s=cost.micro_batch_s, document_seconds=cost.work_s
    )


def costs_of(model, ranks):
    spec = model_from(model)
    layout = even_layout(spec.num_layers, dp=ranks)
    coefficients = analytic_coefficients(spec, cluster_of("h100", ranks), layout)
    return PackCosts(spec, coefficients, layout)


def recorded(lengths, micro_batches, line=1):
    """A step; micro-batches as in a file."""
    counts = np.array([len(of_rank) for of_rank in micro_batches])
    slot_of = np.zeros(len(lengths), np.int64)
    for rank, of_rank in enumerate(micro_batches):
        for index, documents in enumerate(of_rank):
            slot_of[documents] = rank * counts.max() + index
    return RecordedStep(line, np.array(lengths), Partition(slot_of, counts))


def table_of(name):
    return read_length_table(str(ROOT / f"examples/lengths/{name}.npy.gz")).lengths


def written(folder, *lines, name="steps.jsonl"):
    path = folder / name
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return str(path)


@pytest.mark.parametrize(
    ("waits", "micro_batches", "theirs", "ours", "bound_s"),
    [
        # 18 s of work and 4 micro-batches. Index 0: 6 of (6, 3); 1: 5 of (5, 4); two constants. Best: (6, 6), (4, 2).
        ("micro_batch", [[[0], [3]], [[1, 2], [4]]], (12.0, 2.0), (11.0, 1.0), 10.0),
        # Rank 0 has 11 s, rank 1 has 7 s. Best: 9 s each.
        ("step", [[[0], [3]], [[1, 2], [4]]], (12.0, 2.0), (10.0, 0.0), 9.5),
        # 12 s in 3 micro-batches against 6 s in one.
        ("step", [[[0], [3], [1]], [[2, 4]]], (13.5, 3.5), (10.0, 0.0), 9.5),
        # An empty micro-batch is run, too: 10 of (10, 7), then 1 of (1, 0).
        ("micro_batch", [[[0, 4], [1]], [[2, 3], []]], (12.0, 2.0), (11.0, 1.0), 10.0),
    ],
)
def test_two_ranks_by_hand(waits, micro_batches, theirs, ours, bound_s):
    step = recorded([6, 1, 2, 5, 4], micro_batches)
    judged = judge_steps([step], priced(2), A_SECOND_A_TOKEN, 6, waits)
    for found in (judged, *judged.steps):
        assert (found.theirs.step_s, found.theirs.waiting_s) == pytest.approx(theirs)
        assert (found.ours.step_s, found.ours.waiting_s) == pytest.approx(ours)
        assert found.bound_s == pytest.approx(bound_s)
        assert found.theirs.waiting_share == pytest.approx(theirs[1] / theirs[0])
    assert judged.steps[0].theirs.micro_batches == max(map(len, micro_batches))
    assert judged.steps_beyond_limit == (step.largest_tokens > 6)


def test_means_are_of_the_steps_and_progress_goes_through_them():
    steps = [recorded([6, 1], [[[0]], [[1]]], line=3), recorded([2, 2], [[[0]], [[1]]], line=5)]
    seen = []
    judged = judge_steps(steps, priced(2), A_SECOND_A_TOKEN, 6, "step", lambda *one: seen.append(one[:2]))
    assert seen == [(0, 2), (1, 2)]
    assert [(one.step, one.documents, one.tokens) for one in judged.steps] == [(3, 2, 7), (5, 2, 4)]
    assert (judged.theirs.step_s, judged.theirs.waiting_s) == pytest.approx(((6.5 + 2.5) / 2, (2.5 + 0) / 2))
    assert judged.steps_beyond_limit == 0
    unknown = [RecordedStep(1, np.array([6, 1]), None)]
    judged = judge_steps(unknown, priced(2), A_SECOND_A_TOKEN, 6, "step")
    assert (judged.theirs, judged.steps[0].theirs) == (None, None)
    assert judged.recorded is judged.ours


@pytest.mark.parametrize("waits", ["micro_batch", "step"])
def test_ours_is_what_micro_batches_returns(waits):
    """The command tells a user to call it with this cost."""
    num_tokens = table_of("stdlib")[:200].clip(max=16_384)
    costs, step = costs_of("llama3-8b", 4), RecordedStep(1, num_tokens, None)
    cost = fitted_cost(costs, [step])
    judged = judge_steps([step], costs, cost, 16_384, waits)
    made = micro_batches(num_tokens, 4, 16_384, cost=cost, waits=waits)
    assert judged.ours.step_s == pytest.approx(made.step_s, rel=0.01)
    assert judged.ours.micro_batches == made.seconds.shape[1]
    assert judged.bound_s <= judged.ours.step_s <= 1.02 * judged.bound_s


@pytest.mark.parametrize("model", ["llama-7b", "qwen3-30b-a3b", "gemma3-4b"])
def test_three_numbers_say_what_the_cost_model_does(model):
    """Off by less than 1 % of all work, also with windows; and never below 0, where documents are short or alike."""
    costs = costs_of(model, 8)
    num_tokens = table_of("github_dirs").clip(max=32_768)
    cost, exact_s = fitted_cost(costs, [RecordedStep(1, num_tokens, None)]), costs.document_seconds(num_tokens)
    assert np.abs(cost.work_s(num_tokens) - exact_s).sum() < 0.01 * exact_s.sum()
    assert cost.micro_batch_s == pytest.approx(costs.pack_constant_s, rel=1e-3)
    for few in ([7], [512, 512], [1, 2, 3, 4], [100, 130, 140]):
        step = RecordedStep(1, np.array(few), None)
        cost, exact_s = fitted_cost(costs, [step]), costs.document_seconds(step.num_tokens)
        assert cost.work_s(step.num_tokens).sum() == pytest.approx(exact_s.sum(), rel=0.2)


@settings(deadline=None, max_examples=60)
@given(
    num_tokens=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    count=st.integers(1, 4),
    seed=st.integers(0, 999),
    waits=st.sampled_from(["micro_batch", "step"]),
)
def test_ours_is_near_or_below_any_partition_within_the_limit(num_tokens, count, seed, waits):
    """Not always below: in 1,500 steps of at most 6 documents the best of all divisions was shorter in 20 (waits at
    every micro-batch, by 4 % at most) and in 42 (once a step, by 6 %)."""
    step = RecordedStep(
        1,
        np.array(num_tokens),
        Partition(np.random.default_rng(seed).integers(0, 2 * count, len(num_tokens)), np.full(2, count)),
    )
    assume(step.largest_tokens <= 20)
    cost = Cost(linear_s=1.0, quadratic_s=0.1, micro_batch_s=0.5)
    judged = judge_steps([step], priced(2, cost), cost, 20, waits)
    assert judged.ours.step_s <= judged.theirs.step_s * 4 / 3
    assert judged.bound_s <= min(judged.ours.step_s, judged.theirs.step_s) * (1 + 1e-12)
    assert min(judged.ours.waiting_s, judged.theirs.waiting_s) >= -1e-9


def filled(num_tokens, order, ranks, limit):
    """Documents dealt to ranks in this order, and each rank's filled into micro-batches of so many tokens."""
    result = []
    for rank in range(ranks):
        parts = [[]]
        for document in order[rank::ranks].tolist():
            if sum(num_tokens[one] for one in parts[-1]) + num_tokens[document] > limit:
                parts.append([])
            parts[-1].append(document)
        result.append(parts)
    most = max(map(len, result))
    return [parts + [[]] * (most - len(parts)) for parts in result]


@pytest.mark.parametrize("waits", ["micro_batch", "step"])
@pytest.mark.parametrize("table", ["stdlib", "docs", "github_dirs"])
def test_ours_is_never_above_what_trainers_do(table, waits):
    """In arrival order, and longest first; both keep the limit."""
    lengths = table_of(table).clip(max=16_384)
    costs, steps = costs_of("llama3-8b", 8), []
    for begin in range(0, 640, 160):
        num_tokens = lengths[begin : begin + 160]
        for order in (np.arange(160), np.argsort(-num_tokens)):
            steps.append(recorded(num_tokens, filled(num_tokens, order, 8, 16_384)))
    judged = judge_steps(steps, costs, fitted_cost(costs, steps), 16_384, waits)
    assert judged.steps_beyond_limit == 0
    assert all(one.ours.step_s <= one.theirs.step_s for one in judged.steps)


def test_a_file_is_read_also_compressed(tmp_path):
    lines = [
        {"lengths": [5, 3, 9], "micro_batches": [[[2], []], [[1], [0]]]},
        "",
        {"lengths": [4], "micro_batches": [[[0]], [[]]]},
    ]
    path = written(tmp_path, *lines)
    zipped = tmp_path / "steps.jsonl.gz"
    zipped.write_bytes(gzip.compress((tmp_path / "steps.jsonl").read_bytes()))
    for source in (path, str(zipped)):
        first, second = read_steps(source)
        assert (first.line, second.line, first.ranks, first.largest_tokens) == (1, 3, 2, 9)
        assert first.partition.sums(first.num_tokens).tolist() == [[9, 0], [3, 5]]
        assert second.partition.counts.tolist() == [1, 1]
    (alone,) = read_steps(written(tmp_path, {"lengths": [4, 4]}))
    assert (alone.partition, alone.ranks, alone.largest_tokens) == (None, 0, 0)


TWO = {"lengths": [5, 3], "micro_batches": [[[0]], [[1]]]}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "steps.jsonl holds no steps; a line is one step: "),
        ([TWO, "{"], r"steps.jsonl:2: Input data was truncated; a line is one step: "),
        (["[5, 3]"], r":1: Expected `object`, got `array`; a line is one step: "),
        ([{"length": [5]}], r":1: Object contains unknown field `length`"),
        ([{"micro_batches": []}], r":1: Object missing required field `lengths`"),
        ([{"lengths": [5, "3"]}], r":1: Expected `int`, got `str` - at `\$.lengths\[1\]`"),
        ([{"lengths": [5], "micro_batches": [[0]]}], r":1: Expected `array`, got `int` - at `\$.micro_batches"),
        ([{"lengths": []}], r":1: lengths is empty; leave steps without documents out"),
        ([{"lengths": [5, 0]}], r":1: document 1 has 0 tokens, a micro-batch holds 1 to .*leave empty documents out"),
        ([{"lengths": [2**70]}], r":1: document 0 has 1,180,591,620,717,411,303,424 tokens"),
        ([{"lengths": [5, 101]}], r":1: document 1 has 101 tokens, .* 1 to 100; .*or raise --context"),
        ([{"lengths": [5], "micro_batches": [[[1]]]}], r":1: micro_batches names document 1; .* are 0 to 0"),
        ([{"lengths": [5], "micro_batches": [[[-1]]]}], r":1: micro_batches names document -1"),
        ([{"lengths": [5, 3], "micro_batches": [[[1]]]}], r":1: document 0 is 0 times in micro_batches"),
        ([{"lengths": [5, 3], "micro_batches": [[[1, 0], [1]]]}], r":1: document 1 is 2 times in micro_batches"),
        ([{"lengths": [5], "micro_batches": []}], r":1: document 0 is 0 times in micro_batches"),
        ([TWO, {"lengths": [5, 3]}], r":2: micro_batches has no ranks, the steps before have 2"),
        ([{"lengths": [5]}, TWO], r":2: micro_batches has 2 ranks, the steps before have none"),
        ([TWO, {"lengths": [5], "micro_batches": [[[0]]]}], r":2: micro_batches has 1 ranks, the steps before have 2"),
        ([{"lengths": [5, 3], "micro_batches": [[[0], [1]], [[]]]}], r":1: ranks have 1 to 2 micro-batches, and wait"),
    ],
)
def test_lines_that_are_no_steps_are_named(tmp_path, lines, message):
    with pytest.raises(DataError, match=message):
        read_steps(written(tmp_path, *lines), 100 if "100" in message else None)


def test_unequal_counts_are_fine_where_ranks_wait_once(tmp_path):
    lines = [{"lengths": [5, 3], "micro_batches": [[[0], [1]], []]}]
    (step,) = read_steps(written(tmp_path, *lines), equal_counts=False)
    assert step.partition.counts.tolist() == [2, 0]
    with pytest.raises(ConfigError, match=r"'nowhere\.jsonl' does not exist"):
        read_steps("nowhere.jsonl")
