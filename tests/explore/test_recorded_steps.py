"""Recorded steps: read and checked line by line, and both divisions priced alike."""

import gzip
import json
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from evenload.cli.plan_of_steps import RecordedStep, fitted_cost, judge_steps, read_steps
from evenload.cost.analytic import analytic_coefficients
from evenload.cost.pack_cost import PackCosts
from evenload.data.hub import model_from
from evenload.data.lengths import read_length_table
from evenload.errors import ConfigError, DataError
from evenload.planning.micro_batches import Cost, micro_batches
from evenload.types.cluster import cluster_of
from evenload.types.layout import even_layout
from page_blocks import ROOT

A_SECOND_A_TOKEN = Cost(linear_s=1.0, quadratic_s=0.0, micro_batch_s=0.5)


def priced(ranks, cost=A_SECOND_A_TOKEN):
    """Costs that the tests can compute by hand."""
    return SimpleNamespace(
        layout=SimpleNamespace(dp=ranks),
        pack_constant_s=cost.micro_batch_s,
        document_seconds=lambda lengths: cost.work_s(np.array(lengths)),
    )


def costs_of(model, ranks):
    spec = model_from(model)
    layout = even_layout(spec.num_layers, dp=ranks)
    coefficients = analytic_coefficients(spec, cluster_of("h100", ranks), layout)
    return PackCosts(spec, coefficients, layout)


def alone(num_tokens):
    """One step whose partition is not known, as line 1."""
    return {1: RecordedStep(lengths=np.asarray(num_tokens).tolist())}


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
    step = RecordedStep(lengths=[6, 1, 2, 5, 4], micro_batches=micro_batches)
    found = judge_steps({7: step}, priced(2), A_SECOND_A_TOKEN, 6, waits)[7]
    assert np.ravel(found.divisions) == pytest.approx([*theirs, *ours])
    assert (found.documents, found.tokens) == (5, 18)
    assert found.bound_s == pytest.approx(bound_s)
    assert found.recorded_micro_batches == max(map(len, micro_batches))


def test_steps_are_judged_one_by_one_by_their_lines():
    steps = {
        3: RecordedStep(lengths=[6, 1], micro_batches=[[[0]], [[1]]]),
        5: RecordedStep(lengths=[2, 2], micro_batches=[[[0]], [[1]]]),
    }
    seen = []
    judged = judge_steps(steps, priced(2), A_SECOND_A_TOKEN, 6, "step", lambda *one: seen.append(one[:2]))
    assert seen == [(0, 2), (1, 2)]
    assert {line: (one.documents, one.tokens) for line, one in judged.items()} == {3: (2, 7), 5: (2, 4)}
    assert [one.divisions[0] for one in judged.values()] == [pytest.approx((6.5, 2.5)), pytest.approx((2.5, 0))]
    (unknown,) = judge_steps(alone([6, 1]), priced(2), A_SECOND_A_TOKEN, 6, "step").values()
    assert unknown.divisions == [(unknown.step_s, unknown.waiting_s)]
    assert np.isnan([unknown.recorded_step_s, unknown.recorded_waiting_s, unknown.recorded_micro_batches]).all()


@pytest.mark.parametrize("waits", ["micro_batch", "step"])
def test_ours_is_what_micro_batches_returns(waits):
    """The command tells a user to call it with this cost."""
    num_tokens = table_of("stdlib")[:200].clip(max=16_384)
    costs = costs_of("llama3-8b", 4)
    cost = fitted_cost(costs, num_tokens)
    (judged,) = judge_steps(alone(num_tokens), costs, cost, 16_384, waits).values()
    made = micro_batches(num_tokens, 4, 16_384, cost=cost, waits=waits)
    assert judged.step_s == pytest.approx(made.step_s, rel=0.01)
    assert judged.micro_batches == made.seconds.shape[1]
    assert judged.bound_s <= judged.step_s <= 1.02 * judged.bound_s


@pytest.mark.parametrize("model", ["llama-7b", "qwen3-30b-a3b", "gemma3-4b"])
def test_three_numbers_say_what_the_cost_model_does(model):
    """Off by less than 1 % of all work, also with windows; and never below 0, where documents are short or alike."""
    costs = costs_of(model, 8)
    num_tokens = table_of("github_dirs").clip(max=32_768)
    cost, exact_s = fitted_cost(costs, num_tokens), costs.document_seconds(num_tokens)
    assert np.abs(cost.work_s(num_tokens) - exact_s).sum() < 0.01 * exact_s.sum()
    assert cost.micro_batch_s == pytest.approx(costs.pack_constant_s, rel=1e-3)
    for few in ([7], [512, 512], [1, 2, 3, 4], [100, 130, 140]):
        cost, exact_s = fitted_cost(costs, few), costs.document_seconds(few)
        assert cost.work_s(np.array(few)).sum() == pytest.approx(exact_s.sum(), rel=0.2)


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
    slot_of = np.random.default_rng(seed).integers(0, 2 * count, len(num_tokens))
    slots = [np.flatnonzero(slot_of == slot).tolist() for slot in range(2 * count)]
    step = RecordedStep(lengths=num_tokens, micro_batches=[slots[:count], slots[count:]])
    assume(step.largest_tokens <= 20)
    cost = Cost(linear_s=1.0, quadratic_s=0.1, micro_batch_s=0.5)
    (judged,) = judge_steps({1: step}, priced(2, cost), cost, 20, waits).values()
    assert judged.step_s <= judged.recorded_step_s * 4 / 3
    assert judged.bound_s <= min(judged.step_s, judged.recorded_step_s) * (1 + 1e-12)
    assert min(judged.waiting_s, judged.recorded_waiting_s) >= -1e-9


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
    costs, steps = costs_of("llama3-8b", 8), {}
    for begin in range(0, 640, 160):
        num_tokens = lengths[begin : begin + 160]
        for order in (np.arange(160), np.argsort(-num_tokens)):
            dealt = filled(num_tokens, order, 8, 16_384)
            steps[len(steps) + 1] = RecordedStep(lengths=num_tokens.tolist(), micro_batches=dealt)
    assert max(step.largest_tokens for step in steps.values()) <= 16_384
    judged = judge_steps(steps, costs, fitted_cost(costs, lengths[:640]), 16_384, waits)
    assert all(one.step_s <= one.recorded_step_s for one in judged.values())


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
        steps = read_steps(source)
        assert list(steps) == [1, 3]
        assert (steps[1].lengths, steps[1].micro_batches) == ([5, 3, 9], [[[2], []], [[1], [0]]])
        assert (steps[1].largest_tokens, steps[3].largest_tokens) == (9, 4)
    unknown = read_steps(written(tmp_path, {"lengths": [4, 4]}))[1]
    assert (unknown.micro_batches, unknown.largest_tokens) == (None, 0)


TWO = {"lengths": [5, 3], "micro_batches": [[[0]], [[1]]]}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "steps.jsonl holds no steps; leave empty documents out; one step a line, as "),
        ([TWO, "{"], r"steps.jsonl:2: Input data was truncated; leave empty documents out; one step a line, as "),
        (["[5, 3]"], r":1: Expected `object`, got `array`; .*one step a line, as "),
        ([{"length": [5]}], r":1: Object contains unknown field `length`"),
        ([{"micro_batches": []}], r":1: Object missing required field `lengths`"),
        ([{"lengths": [5, "3"]}], r":1: Expected `int`, got `str` - at `\$.lengths\[1\]`"),
        ([{"lengths": [5], "micro_batches": [[0]]}], r":1: Expected `array`, got `int` - at `\$.micro_batches"),
        ([{"lengths": []}], r":1: Expected `array` of length >= 1 - at `\$.lengths`"),
        ([{"lengths": [5, 0]}], r":1: Expected `int` >= 1 - at `\$.lengths\[1\]`; leave empty documents out"),
        ([{"lengths": [2**50]}], r":1: Expected `int` <= 1099511627776 - at `\$.lengths\[0\]`"),
        ([{"lengths": [5, 101]}], r":1: document 1 has 101 tokens, .* holds 100; .*or raise --context"),
        ([{"lengths": [5], "micro_batches": [[[1]]]}], r":1: document 1 is 1 times in micro_batches; each of 0 to 0,"),
        ([{"lengths": [5], "micro_batches": [[[-1]]]}], r":1: document -1 is 1 times in"),
        ([{"lengths": [5, 3], "micro_batches": [[[1]]]}], r":1: document 0 is 0 times in micro_batches"),
        ([{"lengths": [5, 3], "micro_batches": [[[1, 0], [1]]]}], r":1: document 1 is 2 times in micro_batches"),
        ([{"lengths": [5], "micro_batches": []}], r":1: document 0 is 0 times in micro_batches"),
        ([TWO, {"lengths": [5, 3]}], r":2: micro_batches has 0 ranks, the steps before have 2"),
        ([{"lengths": [5]}, TWO], r":2: micro_batches has 2 ranks, the steps before have 0;"),
        ([TWO, {"lengths": [5], "micro_batches": [[[0]]]}], r":2: micro_batches has 1 ranks, the steps before have 2"),
        ([{"lengths": [5, 3], "micro_batches": [[[0], [1]], [[]]]}], r":1: ranks have 1 or 2 micro-batches, and wait"),
    ],
)
def test_lines_that_are_no_steps_are_named(tmp_path, lines, message):
    with pytest.raises(DataError, match=message):
        read_steps(written(tmp_path, *lines), 100 if "100" in message else None)


def test_unequal_counts_are_fine_where_ranks_wait_once(tmp_path):
    lines = [{"lengths": [5, 3], "micro_batches": [[[0], [1]], []]}]
    assert read_steps(written(tmp_path, *lines), equal_counts=False)[1].micro_batches == [[[0], [1]], []]
    with pytest.raises(ConfigError, match=r"'nowhere\.jsonl' does not exist"):
        read_steps("nowhere.jsonl")
