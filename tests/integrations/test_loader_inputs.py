"""Data sets and tokenisers of transformers; what a loader says of its tokeniser, and how it checks ids."""

import json
from collections import Counter

import datasets
import pytest
from transformers.tokenization_python import PythonBackend

from evenload import PackedLoader
from evenload.data.encoders import IGNORE_INDEX
from evenload.data.tokenize import train_byte_pair_tokenizer
from evenload.errors import ConfigError, DataError
from hf_tokenizer import some_tokenizer
from packed_cases import all_documents, documents_of, loader_of, tokens_of, write_texts
from reference_training import tiny_config

SETTINGS = {"max_tokens": 64, "batch_documents": 8, "workers": 0, "epochs": 1}


@pytest.fixture(scope="module")
def tokenizer():
    """A fast tokeniser of transformers with an end of document and a chat template."""
    return some_tokenizer()


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", ["dataset", "iterable"])
def test_data_set_objects_come_exactly_once(tmp_path, kind, workers):
    texts = write_texts(tmp_path)
    data = datasets.Dataset.from_list([{"id": index, "text": text} for index, text in enumerate(texts)])
    if kind == "iterable":
        data = data.to_iterable_dataset(num_shards=3)
    with PackedLoader(data, **(SETTINGS | {"workers": workers, "epochs": None})) as loader:
        for _ in range(2):
            assert all_documents(loader) == Counter(map(tokens_of, texts))


def test_a_data_set_resumes_inside_an_epoch(tmp_path):
    texts = write_texts(tmp_path)
    data = datasets.Dataset.from_dict({"text": texts})
    loader = PackedLoader(data, **SETTINGS)
    steps = loader.steps()
    seen = all_documents([*next(steps), *next(steps)])
    other = PackedLoader(data, **SETTINGS)
    other.load_state_dict(loader.state_dict())
    assert seen + all_documents(other) == Counter(map(tokens_of, texts))


def test_columns_say_what_records_hold():
    ids = datasets.Dataset.from_dict({"input_ids": [[1, 2, 3], [4, 5]], "labels": [[-100, 2, 3], [-100, -100]]})
    loader = PackedLoader(ids, **SETTINGS)
    assert loader.config.record == "tokens"
    (batch,) = loader
    assert sorted(documents_of(batch)) == [(1, 2, 3), (4, 5)]
    assert sorted(batch["labels"][0].tolist()) == [IGNORE_INDEX] * 3 + [2, 3]
    with pytest.raises(ConfigError, match=r'has the keys .*text; set data\.record = "text" or "prompt_completion"'):
        PackedLoader(datasets.Dataset.from_dict({"prompt": ["a"], "completion": ["b"], "text": ["c"]}), **SETTINGS)
    with pytest.raises(DataError, match="has the keys body, which no kind of record has"):
        PackedLoader(datasets.Dataset.from_dict({"body": ["a"]}), **SETTINGS)
    named = datasets.Dataset.from_dict({"body": ["abc"]})
    (batch,) = PackedLoader(named, record="text", text_column="body", **SETTINGS)
    assert documents_of(batch) == [tokens_of("abc")]


def test_splits_are_refused_by_name():
    splits = datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": ["a"]})})
    with pytest.raises(ConfigError, match="has splits train; hand over one of them"):
        PackedLoader(splits, **SETTINGS)


def test_a_tokeniser_of_transformers_gives_its_own_tokens(tmp_path, tokenizer):
    texts = write_texts(tmp_path)
    loader = loader_of(tmp_path, tokenizer=tokenizer, max_tokens=80, epochs=1)
    expected = Counter(
        (*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id) for text in texts
    )
    assert all_documents(loader) == expected
    # The file it was written to is gone; a later loader of the same tokeniser goes on with the state.
    other = loader_of(tmp_path, tokenizer=tokenizer, max_tokens=80, epochs=1)
    other.load_state_dict(loader.state_dict())
    assert not list(other)


@pytest.mark.parametrize("workers", [0, 1])
def test_its_chat_template_and_masks_are_used(tmp_path, tokenizer, workers):
    chat = [{"role": "user", "content": "a small"}, {"role": "assistant", "content": "text"}]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
    with loader_of(tmp_path, tokenizer=tokenizer, record="messages", epochs=1, workers=workers) as loader:
        (batch,) = loader
    expected = tokenizer.apply_chat_template(
        chat, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, add_generation_prompt=False
    )
    assert documents_of(batch) == [tuple(expected["input_ids"])]
    has_loss = (batch["labels"][0] != IGNORE_INDEX).long().tolist()
    assert has_loss == expected["assistant_masks"]
    other = loader_of(tmp_path, tokenizer=tokenizer, record="messages", epochs=1)
    other.load_state_dict(loader.state_dict())


def test_slow_tokenisers_are_refused(tmp_path):
    class Slow(PythonBackend):
        vocab_size = 3

        def get_vocab(self):
            return {"a": 0, "b": 1, "c": 2}

        def _convert_token_to_id(self, token):
            return 0

    write_texts(tmp_path)
    with pytest.raises(ConfigError, match="is a slow one"):
        loader_of(tmp_path, tokenizer=Slow())


def tokenizer_line(loader: PackedLoader) -> str:
    (line,) = (line for line in loader.start_messages if line.startswith("tokenizer"))
    return line.removeprefix("tokenizer").strip()


def test_the_first_lines_name_the_tokeniser(tmp_path):
    write_texts(tmp_path)
    assert tokenizer_line(loader_of(tmp_path)) == (
        "plain bytes and an end of document, 257 ids, because none was given"
    )
    assert tokenizer_line(loader_of(tmp_path, tokenizer="bytes")) == "plain bytes and an end of document, 257 ids"
    file = tmp_path / "own" / "tokenizer.json"
    train_byte_pair_tokenizer(["a text"], 258, file)
    assert tokenizer_line(loader_of(tmp_path, tokenizer=file.parent)) == f"{file} (BPE, 258 ids)"


def test_one_of_transformers_is_called_what_its_caller_loaded(tmp_path):
    from transformers import PreTrainedTokenizerFast

    write_texts(tmp_path)
    train_byte_pair_tokenizer(["a text"], 258, tmp_path / "own" / "tokenizer.json")
    fast = PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "own" / "tokenizer.json"), eos_token="<|endoftext|>", name_or_path="hub/model"
    )
    assert tokenizer_line(loader_of(tmp_path, tokenizer=fast)) == "hub/model (BPE, 258 ids)"


def test_bytes_nobody_asked_for_are_refused_for_a_model_of_the_callers(tmp_path):
    write_texts(tmp_path)
    model = tiny_config("llama", vocab_size=1000)
    with pytest.raises(ConfigError, match="tokenizer is not given, and the model's vocabulary of 1,000 ids"):
        loader_of(tmp_path, model=model)
    loader_of(tmp_path, model=model, tokenizer="bytes")
    loader_of(tmp_path, model=tiny_config("llama", vocab_size=257))
    with pytest.raises(ConfigError, match="makes ids that the model has no embedding for: its vocab_size is 97"):
        loader_of(tmp_path, model=tiny_config("llama", vocab_size=97), tokenizer="bytes")


def test_ids_beyond_the_callers_model_are_named_by_file_and_line(tmp_path):
    rows = [[1, 2, 3], [4, 96], [5, 97, 6], [7, 8]]
    (tmp_path / "ids.jsonl").write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    settings = {"record": "tokens", "model": tiny_config("llama", vocab_size=97), "epochs": 1}
    with pytest.raises(DataError, match=r"ids\.jsonl.*3.*column 'input_ids' holds 97, must be .* the vocabulary's 97"):
        list(loader_of(tmp_path, **settings))
    skipping = loader_of(tmp_path, **settings, on_corrupt="skip")
    assert tokenizer_line(skipping) == "none: records hold token ids, checked: below 97"
    list(skipping)
    assert any("corrupt" in line and " 1 " in line for line in skipping.ledger_lines), skipping.ledger_lines
    by_name = loader_of(tmp_path, **(settings | {"model": "llama-7b"}))
    assert tokenizer_line(by_name) == "none: records hold token ids, not checked, as the model is not known"
    list(by_name)
