"""What a model writes while it trains: transformers' own greedy text, and a run that stays the same to the bit."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from dist_training import assert_same_training, run_outcome
from evenload.cli.worker_setup import require_runnable
from evenload.config.sections import SamplesConfig
from evenload.config.train_config import load_train_config
from evenload.data.config import DataConfig
from evenload.data.tokenize import ByteTokenizer, FileTokenizer
from evenload.errors import ConfigError
from evenload.runtime.stages.evaluation import Sampler
from training_cases import model_of_state, write_training_config

PROMPTS = ("document ", "a")
SAMPLES = [f"samples.prompts={list(PROMPTS)}", "samples.every_steps=2", "samples.max_new_tokens=12"]


DATA = DataConfig(sources=("x",), max_document_tokens=64, batch_documents=1)


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    return write_training_config(tmp_path, (f"document {i} " * (1 + (i * 7) % 13) for i in range(40)))


def test_samples_are_transformers_own_and_change_nothing(gloo_pool, config_file, tmp_path):
    settings, result = ["parallel.dp=2"], {}
    for name, more in (("with", SAMPLES), ("without", [])):
        here = [*settings, *more, f"train.output_dir={tmp_path / name}"]
        result[name] = gloo_pool.run(2, run_outcome, str(config_file), here, 2**34, 4)[0]
    assert_same_training(result["with"], result["without"], 0.0)
    assert [(one.step, one.prompt) for one in result["with"].samples] == [(s, p) for s in (1, 3) for p in PROMPTS]
    expected = [plain_text(config_file, result["with"].state, prompt) for prompt in PROMPTS]
    assert [one.text for one in result["with"].samples[-2:]] == expected


@torch.no_grad()
def plain_text(config_file: Path, state: dict[str, np.ndarray], prompt: str) -> str:
    """The whole text through the model once for every token."""
    model, tokenizer = model_of_state(load_train_config(config_file, []), state), ByteTokenizer()
    tokens = tokenizer.encode(prompt).tolist()
    written: list[int] = []
    while len(written) < 12:
        token = int(model(torch.tensor([[*tokens, *written]])).logits[0, -1].argmax())
        if token == tokenizer.eos_id:
            break
        written.append(token)
    return tokenizer.decode(np.array(written))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["parallel.pp=2"], "in layout pp=2 no process holds the whole model; samples need pp, virtual and tp 1"),
        (["parallel.tp=2"], "in layout tp=2 no process holds the whole model"),
        (["samples.every_steps=0"], "samples.every_steps is 0, must be at least 1"),
        (["data.record=tokens"], "there is no tokeniser for the prompts"),
        (["samples.prompts=[]"], r"samples.prompts is \[\]; give at least one text"),
    ],
)
def test_samples_that_cannot_be_written_are_refused(config_file, settings, message):
    with pytest.raises(ConfigError, match=message):
        require_runnable(load_train_config(config_file, [*SAMPLES, *settings]))


def test_prompts_that_the_model_cannot_write_on_from_are_refused(tmp_path):
    settings = SamplesConfig(prompts=("abc",), every_steps=1, max_new_tokens=10)
    why = r"'abc' of 3 tokens and samples.max_new_tokens 10 are more than the model's 12"
    with pytest.raises(ConfigError, match=why):
        Sampler(settings, DATA, ByteTokenizer(), 12)
    Sampler(settings, DATA, ByteTokenizer(), 13)
    words = Tokenizer(WordLevel({"abc": 0, "<eos>": 1}))
    words.pre_tokenizer = WhitespaceSplit()
    words.save(str(tmp_path / "tokenizer.json"))
    blank = SamplesConfig(prompts=("abc", " "), every_steps=1)
    with pytest.raises(ConfigError, match=r"prompt ' ' is no token of tokenizer 'tokenizer.json"):
        Sampler(blank, DATA, FileTokenizer(tmp_path, "<eos>"), None)
