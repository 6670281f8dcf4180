"""`evenload train` on chats: what is said of masks that teach nothing, and what the exported model ends with."""

import json
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from chat_cases import CHATML, chat, train_chat_tokenizer
from commands import start_train
from evenload.config.train_config import load_train_config
from evenload.data.tokenize import FileTokenizer
from evenload.errors import ConfigError
from reference_training import tiny_config
from small_run import write_small_costs


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A model whose template ends with another token than its tokeniser says, and conversations, of which one in two
    is a question alone."""
    tiny_config("llama", vocab_size=400).save_pretrained(tmp_path / "model")
    train_chat_tokenizer(tmp_path / "model")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "chat_template": CHATML.plain}
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "model" / "generation_config.json").write_text('{"eos_token_id": 2}')
    rows = [{"messages": chat("q", "a")}, {"messages": chat("only a question")}] * 3
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    write_small_costs(tmp_path)
    (tmp_path / "config.toml").write_text(
        """
        [model]
        path = "model"
        random_init = true
        [data]
        sources = ["rows.jsonl"]
        record = "messages"
        max_document_tokens = 256
        batch_documents = 6
        workers = 0
        [train]
        steps = 1
        output_dir = "run"
        cost_file = "cost.json"
        """
    )
    return tmp_path


@pytest.mark.long
def test_a_run_says_what_teaches_nothing_and_exports_the_end_of_its_documents(project):
    process = start_train(project)
    output, _ = process.communicate(timeout=500)
    assert process.returncode == 0, output
    assert "evenload: warning: after what the assistant says, the chat template teaches none of the tokens" in output
    assert "set data.eos_token to the special token that the template writes there (<|im_end|>)" in output
    assert "evenload: warning: 3 of the first 6 documents have no token with a loss and teach nothing" in output
    assert "3 of these documents taught nothing: no loss at all" in output
    model = project / "run" / "model"
    eos_id = FileTokenizer(model).special_tokens()["</s>"]
    loaded = AutoTokenizer.from_pretrained(model)
    assert (loaded.eos_token, loaded.eos_token_id) == ("</s>", eos_id)
    assert AutoConfig.from_pretrained(model).eos_token_id == eos_id
    assert GenerationConfig.from_pretrained(model).eos_token_id == [eos_id, 2]


def test_settings_that_change_ids_are_refused_before_processes_start(project, monkeypatch):
    from evenload.cli.worker_setup import require_runnable

    monkeypatch.chdir(project)
    config = load_train_config(project / "config.toml", [])
    require_runnable(config)
    file = project / "model" / "tokenizer_config.json"
    changed = {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))
    with pytest.raises(ConfigError, match=r"tokeniser of .*model as GPT2Tokenizer .* makes other ids"):
        require_runnable(config)
