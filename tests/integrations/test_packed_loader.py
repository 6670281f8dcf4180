import itertools
import json
from collections import Counter

import pytest

from evenload import PackedLoader
from evenload.data.config import DataConfig, MixturePart
from evenload.data.encoders import IGNORE_INDEX
from evenload.errors import ConfigError, DataError
from packed_cases import (
    all_documents,
    batch_fingerprint,
    documents_of,
    epoch_of_ranks,
    loader_of,
    tiny_model,
    tokens_of,
    write_texts,
)

WHOLE = ("padded", "best_fit", "fixed_greedy", "balanced", "wlb")


def write_sizes(root, sizes):
    """Documents of so many tokens."""
    (root / "sized.jsonl").write_text("".join(json.dumps({"text": "a" * (size - 1)}) + "\n" for size in sizes))


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize(
    ("engine", "strategy"),
    [*((None, name) for name in ("auto", *WHOLE)), *(("deepspeed", name) for name in WHOLE[1:]), ("fsdp2", "auto")],
)
def test_every_document_comes_exactly_once_an_epoch(tmp_path, engine, strategy, world_size):
    texts = write_texts(tmp_path)
    ranks = epoch_of_ranks(tmp_path, world_size, engine=engine, strategy=strategy, epochs=1)
    result = all_documents(batch for batches in ranks for batch in batches)
    if strategy == "padded":  # padding belongs to the document before it
        result = Counter(tuple(token for token in document if token) for document in result.elements())
    assert result == Counter(map(tokens_of, texts))
    if engine != "deepspeed":
        assert len({len(batches) for batches in ranks}) == 1


@pytest.mark.parametrize("strategy", WHOLE)
def test_all_ranks_run_equally_many_micro_batches(tmp_path, strategy):
    """Otherwise data-parallel training waits for ever (verl#6176, axolotl#494)."""
    write_texts(tmp_path, num_documents=7)
    ranks = epoch_of_ranks(tmp_path, 4, strategy=strategy, batch_documents=5, epochs=1)
    settings = {"world_size": 4, "strategy": strategy, "batch_documents": 5, "epochs": 1}
    counts = [[len(step) for step in loader_of(tmp_path, rank=rank, **settings).steps()] for rank in range(4)]
    assert counts.count(counts[0]) == 4
    assert len({len(batches) for batches in ranks}) == 1
    empty = [batch for batches in ranks for batch in batches if not documents_of(batch)]
    assert empty, "the last batch of two documents must leave ranks short of work"
    for batch in empty:
        assert batch["labels"].tolist() == [[IGNORE_INDEX]]
        assert batch["input_ids"].shape == (1, 1)


def test_ranks_may_run_what_they_have(tmp_path):
    write_texts(tmp_path, num_documents=7)
    ranks = epoch_of_ranks(tmp_path, 4, batch_documents=5, equal_micro_batches=False, epochs=1)
    assert all(documents_of(batch) for batches in ranks for batch in batches)
    assert len({len(batches) for batches in ranks}) > 1


@pytest.mark.parametrize(
    ("engine", "strategy"), [*((None, name) for name in WHOLE), *(("trainer", name) for name in ("auto", "wlb"))]
)
def test_a_fixed_number_of_micro_batches_is_exact(tmp_path, engine, strategy):
    texts = write_texts(tmp_path, longest=30)
    settings = {"engine": engine, "strategy": strategy, "micro_batches": 8, "epochs": 1}
    ranks = [list(loader_of(tmp_path, rank=rank, world_size=2, **settings).steps()) for rank in range(2)]
    assert all(len(step) == 8 for steps in ranks for step in steps)
    if strategy != "padded":
        batches = [batch for steps in ranks for step in steps for batch in step]
        assert all_documents(batches) == Counter(map(tokens_of, texts))


def test_a_batch_beyond_the_micro_batches_names_cap_tokens_and_fix(tmp_path):
    write_texts(tmp_path)
    loader = loader_of(tmp_path, micro_batches=1, batch_documents=30)
    with pytest.raises(
        ConfigError, match=r"needs \d+ micro-batches on a rank, micro_batches is 1.*All 1 must hold \d+ tokens.*Lower"
    ):
        next(iter(loader))
    with pytest.raises(ConfigError, match="batch_tokens is 500, but 1 rank x 2 micro_batches x 64 max_tokens hold 128"):
        loader_of(tmp_path, micro_batches=2, batch_tokens=500)


def test_balanced_packs_tightly_where_the_number_is_fixed(tmp_path):
    """Equal times alone would open a third pack for the 24 tokens, though two hold everything."""
    write_sizes(tmp_path, [32, 32, 20, 20, 24])
    step = next(loader_of(tmp_path, micro_batches=2, batch_documents=5, shuffle_window=1).steps())
    assert sorted(pack.num_tokens for pack in step.packs) == [64, 64]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"strategy": "sequential"}, "cuts documents.*Choose balanced, .*or auto.*'evenload train' runs slices"),
        ({"strategy": "slimpack"}, "cuts documents"),
        ({"accept_slices": True}, "PackedLoader has no 'accept_slices'"),
        ({"strategy": "flexpipe"}, "changes the layout between steps"),
        ({"strategy": "best_fitt"}, "did you mean 'best_fit'"),
        ({"packing_strategy": "bfd"}, "it is called strategy here"),
        ({"num_workers": 2}, "it is called workers here"),
        ({"shufle_window": 2}, "did you mean 'shuffle_window'"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"micro_batches": 0}, "micro_batches is 0"),
        ({"format": "jax"}, "format is 'jax'"),
        ({"rank": 1}, "give both or none"),
        ({"rank": 2, "world_size": 2}, r"must be in 0 \.\. 1"),
        ({"group": object()}, "not initialised"),
        ({"strategy": "fixed_exact", "rank": 0, "world_size": 2}, "would plan differently"),
        ({"max_document_tokens": 65}, "fits no pack"),
        ({"tokenizer": 3}, "tokenizer is a int"),
        ({"model": 3}, "model is a int"),
        ({"batch_tokens": 64, "batch_documents": 3}, "set exactly one"),
        ({"batch_tokens": "auto", "batch_documents": 3}, "set exactly one"),
        ({"plan_options": {"window": 4}}, "window is 4 with strategy auto.*Name fixed_greedy"),
        ({"pack_multiple": 10}, "set max_tokens to a multiple, such as 70"),
        ({"pack_multiple": 0}, "pack_multiple is 0"),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(tmp_path, changes, message):
    write_texts(tmp_path)
    with pytest.raises(ConfigError, match=message):
        loader_of(tmp_path, **changes)


def test_data_of_an_unknown_kind_is_refused():
    with pytest.raises(ConfigError, match="data is a dict"):
        PackedLoader({"train": 1}, max_tokens=8, batch_documents=2)


def test_a_configuration_brings_mixtures_and_its_own_limits(tmp_path):
    short = write_texts(tmp_path / "short", num_documents=20, longest=10, seed=1)
    long = write_texts(tmp_path / "long", num_documents=5, longest=60, seed=2)
    mixture = tuple(
        MixturePart(name=name, weight=weight, sources=(str(tmp_path / name),))
        for name, weight in (("short", 1), ("long", 2))
    )
    config = DataConfig(mixture=mixture, max_document_tokens=60, batch_documents=4, workers=0)
    loader = PackedLoader(config, max_tokens=100, batch_tokens=80)
    assert (loader.config.batch_tokens, loader.config.batch_documents) == (80, None)
    assert all_documents(loader) == Counter(map(tokens_of, short + long))


def test_an_error_of_the_source_comes_in_its_place_and_again(tmp_path):
    texts = write_texts(tmp_path)
    with open(tmp_path / "texts.jsonl", "a") as file:
        file.write("{broken\n")
    loader = loader_of(tmp_path, shuffle_window=4, streams=1)
    documents, counts = Counter(), []
    for _ in range(2):
        batches = iter(loader)
        with pytest.raises(DataError, match=r"texts.jsonl"):
            documents.update(document for batch in batches for document in documents_of(batch))
        counts.append(documents.total())
    assert documents == Counter(map(tokens_of, texts))
    assert counts == [40, 40], "the batches before the bad one come once; asked again, the same error comes again"


def test_labels_follow_the_record(tmp_path):
    rows = [{"prompt": "ab" * (1 + index % 4), "completion": "cde"} for index in range(12)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for batch in loader_of(tmp_path, record="prompt_completion"):
        labels, tokens = batch["labels"][0], batch["input_ids"][0]
        assert set(tokens[labels == IGNORE_INDEX].tolist()) <= set(b"ab")
        assert (labels[labels != IGNORE_INDEX] == tokens[labels != IGNORE_INDEX]).all()
        assert set(labels[labels != IGNORE_INDEX].tolist()) == {*b"cde", 256}


def test_a_step_without_a_loss_is_taken(tmp_path, caplog):
    (tmp_path / "ids.jsonl").write_text('{"input_ids": [1, 2, 3], "labels": [-100, -100, -100]}\n' * 4)
    loader = loader_of(tmp_path, record="tokens", labels_column="labels", batch_documents=4)
    (step,) = loader.steps()
    assert step.num_label_tokens == 0
    assert step.batches[0]["num_items_in_batch"] == 1
    assert "no token with a loss" in caplog.text


def test_start_lines_say_what_is_done_and_what_is_not(tmp_path, caplog):
    write_texts(tmp_path)
    caplog.set_level("INFO", "evenload.loader")
    loader = loader_of(tmp_path, micro_batches=6, model="qwen2.5-0.5b")
    assert "auto: every global batch by the strategy that is fastest by the price of a plain loop" in caplog.text
    loader = loader_of(tmp_path, micro_batches=6, model="qwen2.5-0.5b", strategy="balanced")
    next(iter(loader))
    text = caplog.text
    for part in ("balanced: whole", "qwen2.5-0.5b", "exactly 6 packs", "no attention_mask", "seed 3", "not done"):
        assert part in text
    assert "first step    8 documents" in text
    # Only once, however long the run.
    list(loader)
    assert caplog.text.count("first step") == 1


def test_a_model_that_nobody_named_is_said_first(tmp_path, caplog):
    write_texts(tmp_path)
    loader = loader_of(tmp_path)
    assert loader.model_is_assumed
    assert "llama-7b, which is assumed: give the model you train" in loader.start_messages[0]
    assert not caplog.records
    list(itertools.islice(loader, 3))
    # Without any setting of logging: a warning, once.
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "PackedLoader(model=...)" in caplog.text


def test_a_model_given_later_is_the_one_that_packs_are_balanced_for(tmp_path, caplog):
    write_texts(tmp_path, num_documents=60, longest=60)
    config = tiny_model().config
    named = loader_of(tmp_path, model=config, batch_documents=30, rank=0, world_size=2)
    given = loader_of(tmp_path, batch_documents=30, rank=0, world_size=2)
    assumed = loader_of(tmp_path, batch_documents=30, rank=0, world_size=2)
    given.balance_for(tiny_model())
    assert not given.model_is_assumed
    assert given.start_messages[0] == named.start_messages[0]
    steps = [next(loader.steps()) for loader in (named, given, assumed)]
    assert steps[0].plan.digest == steps[1].plan.digest != steps[2].plan.digest
    assert sum("assumed" in record.message for record in caplog.records) == 1
    with pytest.raises(ConfigError, match="after steps were made for another one"):
        assumed.balance_for(config)


@pytest.mark.parametrize(
    ("settings", "lengths", "line"),
    [
        ({"pack_multiple": 16, "micro_batches": 8}, {16, 32, 48, 64}, "each padded to a multiple of 16 tokens"),
        ({"fixed_shapes": True}, {64}, "each padded to 64 tokens"),
    ],
    ids=["multiple", "fixed"],
)
def test_packs_of_certain_lengths(tmp_path, settings, lengths, line):
    """Sequence parallelism stops at a pack whose tokens the tensor-parallel ranks do not divide."""
    texts = write_texts(tmp_path)
    loader = loader_of(tmp_path, epochs=1, **settings)
    batches = list(loader)
    assert {batch["input_ids"].shape[1] for batch in batches} <= lengths
    result = all_documents(batches)
    padding = {document for document in result if not any(document)}
    assert padding, "no pack was padded"
    for document in padding:
        del result[document]
    assert result == Counter(map(tokens_of, texts))
    assert line in "\n".join(loader.start_messages)


def test_closing_keeps_the_place(tmp_path):
    write_texts(tmp_path)
    whole = list(map(batch_fingerprint, loader_of(tmp_path, epochs=1, workers=1)))
    with loader_of(tmp_path, epochs=1, workers=1) as loader:
        batches = [batch_fingerprint(next(iter(loader)))]
        loader.close()
        batches += list(map(batch_fingerprint, loader))
        loader.close()
        batches += list(map(batch_fingerprint, loader))
    assert batches == whole
