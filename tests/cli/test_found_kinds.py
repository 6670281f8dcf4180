"""Commands on data of any form, without a setting that says which."""

import json
import shutil

import pytest

import evenload
from commands import refused, run
from evenload.config.train_config import load_train_config
from evenload.data.tokenize import train_byte_pair_tokenizer
from evenload.report.run_files import read_validations

SETTINGS = """
max_document_tokens = 1024
batch_documents = 3
chat_template = "chatml"
[train]
steps = 1
threads_per_process = 1
cost_file = "cost.json"
export_hf = false
"""
SHARED = [
    {"conversations": [{"from": "human", "value": f"question {i}"}, {"from": "gpt", "value": f"answer {i}"}]}
    for i in range(9)
]


@pytest.fixture
def project(small_project):
    directory = small_project(SETTINGS)
    write(directory / "chats.jsonl", SHARED)
    write(directory / "held_out.jsonl", [{"text": f"held out {i}"} for i in range(4)])
    return directory


def write(path, rows):
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def train(*overrides):
    return evenload.train("config.toml", overrides=list(overrides))


CHATS = 'data.sources=["chats.jsonl"]'


def test_train_finds_the_kind_and_validates_on_another_one(project, capfd):
    run_of = train(CHATS, 'validation.sources=["held_out.jsonl"]')
    shown = "".join(capfd.readouterr())
    assert "source chats.jsonl: 1 jsonl file, 9 records | used as conversations: conversations" in shown
    (validation,) = read_validations(run_of.output_dir / "validation.jsonl")[-1:]
    assert validation.whole.documents == 4
    assert validation.whole.label_tokens == sum(len(f"held out {i}") for i in range(4)), "texts, and their ends"


def test_train_holds_out_chats(project, capfd):
    run_of = train(CHATS, "validation.share=0.5")
    assert 0 < read_validations(run_of.output_dir / "validation.jsonl")[-1].whole.documents < 9


@pytest.mark.parametrize("order", [("text", "auto"), ("auto", "text")])
def test_a_run_goes_on_whether_the_kind_was_named_or_found(project, order):
    write(project / "texts.jsonl", [{"text": f"document {i}"} for i in range(9)])
    for steps, record in enumerate(order, start=1):
        finished = train('data.sources=["texts.jsonl"]', f"data.record={record}", f"train.steps={steps}")
        assert len(finished.rows) == steps


def test_a_mixture_goes_on_whether_the_kinds_were_named_or_found(project):
    write(project / "texts.jsonl", [{"text": f"document {i}"} for i in range(9)])
    parts = [("texts", ""), ("chats", ', record="conversations"')]
    for steps, is_named in enumerate((True, False), start=1):
        mixture = ", ".join(
            f'{{name="{name}", weight=1.0, sources=["{name}.jsonl"]{kind if is_named else ""}}}' for name, kind in parts
        )
        named = ['data.record="text"'] if is_named else []
        finished = train("data.sources=[]", f"data.mixture=[{mixture}]", f"train.steps={steps}", *named)
        assert len(finished.rows) == steps


@pytest.mark.usefixtures("no_ranks")
def test_train_refuses_what_it_cannot_tell_before_ranks_start(project, capsys):
    write(project / "chats.jsonl", [SHARED[0] | {"text": "a"}])
    assert 'chats.jsonl:1 has the keys conversations, text; set data.record = "text" or "conv' in refused(
        capsys, "train", "config.toml", CHATS
    )
    write(project / "chats.jsonl", [SHARED[0], {"text": "a"}])
    assert "chats.jsonl:1 of kind conversations, chats.jsonl:2 of kind text" in refused(
        capsys, "train", "config.toml", CHATS
    )


def test_ids_that_are_found_need_no_tokeniser_of_the_model(project):
    train_byte_pair_tokenizer(["a document of some words "] * 20, 257, project / "model" / "tokenizer.json")
    write(project / "ids.jsonl", [{"input_ids": [1, 2, 3]}])
    found = load_train_config(project / "config.toml", ['data.sources=["ids.jsonl"]']).with_found_kinds()
    named = load_train_config(project / "config.toml", ['data.sources=["ids.jsonl"]', "data.record=tokens"])
    assert found == named
    assert found.data.tokenizer is None
    texts = load_train_config(project / "config.toml").with_found_kinds()
    assert texts.data.tokenizer == str(project / "model")


@pytest.mark.parametrize("source", ["chats.jsonl", "config.toml"])
def test_plan_counts_chats_and_says_so(project, capsys, source):
    if source == "config.toml":
        shutil.move("chats.jsonl", "corpus")
        for file in (project / "corpus").glob("*.txt"):
            file.unlink()
    small = ("--model", "model/config.json", "--cluster", "h100x2", "--documents", "4", "--strategy", "best_fit")
    assert run("plan", source, *small) == 0
    shown = capsys.readouterr().out
    assert "records are read as conversations, written by chat template chatml" in shown
    said = "tokens are estimated, 4 bytes each" if source == "chats.jsonl" else "lengths are counted in bytes"
    assert said in shown
