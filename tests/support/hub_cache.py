"""The Hugging Face Hub's cache with models of which only settings and a tokeniser are there, and no network."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def use_hub_cache(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process read this cache, and reach no network."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(hub))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def add_model(hub: Path, name: str, config: Mapping[str, Any]) -> Path:
    """Add a model as the client lays it out, whose tokeniser has a token for every word and a chat template."""
    model = hub / f"models--{name.replace('/', '--')}"
    folder = model / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(COMMIT)
    (folder / "config.json").write_text(json.dumps(config))
    words = {
        word: index for index, word in enumerate(("<|endoftext|>", "<|end|>", "user", "assistant", "word", "other"))
    }
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="other"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = (
        "{% for message in messages %}{{ message.role }} "
        "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|end|>{% endgeneration %}"
        "{% else %}{{ message.content }} {% endif %}{% endfor %}"
    )
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
