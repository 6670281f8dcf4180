"""Whole runs on records of sequences that share prefixes: as trees, loader, planner and runtime train what they train
of the same sequences one a record."""

import json

import numpy as np
import pytest

from dist_training import train_steps, trained_rows
from small_run import write_small_run

LIMIT = 1e-9


def groups():
    """Three prompts with four answers each, and two sequences that share nothing."""
    rng = np.random.default_rng(3)

    def tokens(count):
        return rng.integers(1, 250, count).tolist()

    found = []
    for prompt, answers in ((60, (40, 9, 25, 3)), (20, (90, 80, 1, 33)), (45, (5, 70, 12, 12))):
        shared = tokens(prompt)
        found.append([shared + tokens(answer) for answer in answers])
    return [*found, [tokens(50)], [tokens(7)]]


def write_run(directory, records, batch_documents, more=""):
    directory.mkdir()
    file = directory / "records.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in records))
    settings = f"""
        max_document_tokens = 512
        batch_documents = {batch_documents}
        epochs = 4
        min_shared_tokens = 8
        {more}
        [train]
        steps = 4
    """
    config = write_small_run(directory, ["unused"], settings)
    config.write_text(config.read_text().replace(f'["{directory / "corpus"}"]', f'["{file}"]'))
    return str(config)


def one_by_one(directory):
    return write_run(directory, [{"input_ids": one} for group in groups() for one in group], 14)


FLOAT64 = ["model.dtype=float64", "plan.memory_bytes=1000000000"]


@pytest.mark.parametrize(
    ("ranks", "more"),
    [
        (1, ["plan.strategy=slimpack"]),
        (2, ["parallel.dp=2", "plan.strategy=auto"]),
        (2, ["parallel.pp=2", "plan.strategy=slimpack"]),
    ],
    ids=["one rank", "dp2 auto", "pp2 slimpack"],
)
def test_trees_train_as_their_sequences(gloo_pool, tmp_path, ranks, more):
    as_lists = [{"input_ids": group if len(group) > 1 else group[0]} for group in groups()]
    lists = write_run(tmp_path / "lists", as_lists, 5)
    # Records that follow each other, with the prompt's name.
    named = [{"input_ids": one, "prompt": f"p{at}"} for at, group in enumerate(groups()) for one in group]
    grouped = write_run(tmp_path / "grouped", named, 5, 'group_by = "prompt"')
    losses = [
        gloo_pool.run(ranks, train_steps, config, [*FLOAT64, *more], 4)[0]
        for config in (one_by_one(tmp_path / "plain"), lists, grouped)
    ]
    assert len(set(losses[0])) == 4
    assert losses[1] == pytest.approx(losses[0], rel=LIMIT)
    assert losses[2] == pytest.approx(losses[0], rel=LIMIT)


def test_trees_that_are_cut_into_single_sequences_train(gloo_pool, tmp_path):
    """A part that holds one sequence is no tree, but says what it computes again; in plans, too."""
    prompt = list(range(1, 201))
    records = [{"input_ids": [[*prompt, *[n] * 60] for n in (4, 5, 6)]}]
    losses = []
    for name, limit, most in (("whole", 512, 512), ("cut", 330, 330), ("beyond", 260, 380)):
        config = write_run(tmp_path / name, records, 2 if name == "cut" else 1)
        more = [*FLOAT64, "plan.strategy=auto", f"data.max_document_tokens={limit}", f"data.max_tree_tokens={most}"]
        losses.append(gloo_pool.run(1, train_steps, config, more, 2)[0])
    assert losses[1] == pytest.approx(losses[0], rel=LIMIT)
    assert losses[2] == pytest.approx(losses[0], rel=LIMIT)


@pytest.mark.parametrize("more", [["parallel.dp=2"], ["parallel.dp=2", "parallel.pp=2"]], ids=["dp2", "dp2 pp2"])
def test_a_large_tree_is_shared_by_replicas_and_trains_as_its_sequences(gloo_pool, tmp_path, more):
    rng = np.random.default_rng(5)
    prompt = rng.integers(1, 250, 30).tolist()
    turn = prompt + rng.integers(1, 250, 12).tolist()
    large = [turn[:36], *([*(turn if n % 2 else prompt), *rng.integers(1, 250, 40).tolist()] for n in range(9))]
    small = [[9] * 10 + [n] * 5 for n in (1, 2)]
    ranks, more = 2 ** len(more), [*FLOAT64, "plan.strategy=slimpack", *more]
    sequences = [{"input_ids": one} for one in (*large, *small, [5] * 20)]
    config = write_run(tmp_path / "plain", sequences, len(sequences))
    expected = gloo_pool.run(ranks, train_steps, config, more, 4)[0]
    lists = [{"input_ids": large}, {"input_ids": small}, {"input_ids": [5] * 20}]
    config = write_run(tmp_path / "trees", lists, 3)
    rows = gloo_pool.run(ranks, trained_rows, config, more, 4)[0]
    assert [row["loss"] for row in rows] == pytest.approx(expected, rel=LIMIT)
    assert all(row["recomputed_tokens"] >= 30 for row in rows)
    assert {row["path_tokens_per_s"] / row["tokens_per_s"] > 1.5 for row in rows} == {True}
    # A resumed run cuts as one that never stopped.
    parts = write_run(tmp_path / "parts", lists, 3)
    found = [loss for stop in (1, 3, 4) for loss in gloo_pool.run(ranks, train_steps, parts, more, stop)[0]]
    assert found == [row["loss"] for row in rows]


def test_an_interrupted_run_goes_on_to_the_bit_and_tells_tokens(gloo_pool, tmp_path):
    records = [{"input_ids": group if len(group) > 1 else group[0]} for group in groups()]
    whole, parts = (write_run(tmp_path / name, records, 2) for name in ("whole", "parts"))
    more = ["parallel.pp=2", "plan.strategy=slimpack"]
    rows = gloo_pool.run(2, trained_rows, whole, more, 4)[0]
    found = [loss for stop in (1, 3, 4) for loss in gloo_pool.run(2, train_steps, parts, more, stop)[0]]
    assert found == [row["loss"] for row in rows]
    assert any(row["tree_token_ratio"] > 1.5 for row in rows)
    assert all(row["path_tokens_per_s"] >= row["tokens_per_s"] for row in rows)


@pytest.mark.parametrize(
    ("ranks", "more", "message"),
    [
        (1, ["plan.strategy=wlb"], "wlb"),
        (
            1,
            ["plan.strategy=balanced", "data.max_tree_tokens=513"],
            r"max_pack_tokens is 512, documents may have 513 .*data\.max_tree_tokens.* balanced never cuts a document",
        ),
        (2, ["parallel.cp=2"], "trees of shared prefixes: layout cp=2 divides documents over ranks; use cp=1"),
    ],
)
def test_what_trains_no_trees_says_so(gloo_pool, tmp_path, ranks, more, message):
    config = write_run(tmp_path / "run", [{"input_ids": group} for group in groups()[:3]], 3)
    with pytest.raises(RuntimeError, match=message):
        gloo_pool.run(ranks, train_steps, config, more, 1)
