"""What an exported model's directory needs beside the index: tensor files that others may read, and the tokeniser.

safetensors writes through a temporary file that only its owner may read; an exported file gets the permissions that
any new file of this process has.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoTokenizer

from evenload.data.config import DataConfig, trains_given_ids
from evenload.data.encoding.tokenize import BYTES, FileTokenizer, open_tokenizer
from evenload.errors import ConfigError
from evenload.hub.hub_files import local_path
from evenload.runtime.config.run_tokenizer import TOKENIZER_FILE, model_directory

GENERATION_FILE = "generation_config.json"
_CONFIG_FILE, _TEMPLATE_FILE = "tokenizer_config.json", "chat_template.jinja"
_BESIDE_TOKENIZER = (
    _CONFIG_FILE, "special_tokens_map.json", "added_tokens.json", _TEMPLATE_FILE, "chat_template.json", "vocab.json",
    "merges.txt", "tokenizer.model", "spiece.model",
)  # fmt: skip
_MORE_TEMPLATES = "additional_chat_templates"
# What tokenisers split differently: digits, contractions, runs of white space, other scripts.
_PROBE = "Chapter 12: it's 2048 words, don't  they\n\n\tsay? naïve 東京 x=[1,2,3];\n"


def save_tensors(tensors: dict[str, Tensor], file: Path) -> None:
    """Write a safetensors file with the permissions of an ordinary new file."""
    file.unlink(missing_ok=True)
    file.touch()
    mode = file.stat().st_mode
    save_file(tensors, file, metadata={"format": "pt"})
    os.chmod(file, mode)


def tokenizer_source(data: DataConfig, model_path: str) -> Path | None:
    """The `tokenizer.json` that belongs to a trained model; None where the run used plain bytes, or there is none.

    Records of token ids were made by the model's own tokeniser, as far as anybody knows.
    """
    if data.tokenizer in (None, BYTES) and not trains_given_ids(data):
        return None
    named = None if data.tokenizer in (None, BYTES) else local_path(data.tokenizer, "data.tokenizer", "tokenizer")
    path = model_directory(model_path) if named is None else Path(named)
    if path is None:
        return None
    file = path / TOKENIZER_FILE if path.is_dir() else path
    return file if file.is_file() else None


def tokenizer_note(directory: Path, data: DataConfig, model_path: str) -> str:
    """What lies beside an exported model, for the line that says where it is; also where transformers would load other
    tokens than those that were trained."""
    source = tokenizer_source(data, model_path)
    if source is not None:
        return f"with the tokeniser of {source.parent}{_difference(directory)}"
    return "without a tokeniser: " + (
        "records hold token ids" if trains_given_ids(data) else "it trained on plain bytes"
    )


def _difference(directory: Path) -> str:
    """transformers has classes of its own for some kinds of models, which split text by their own rules whatever
    `tokenizer.json` says; published models agree with theirs, a tokeniser that somebody trained need not."""
    ours = FileTokenizer(directory).encode(_PROBE).tolist()
    try:
        loaded: Any = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
        theirs = loaded(_PROBE, add_special_tokens=False)["input_ids"]
    except Exception as error:  # transformers has no common class
        return f", which transformers' AutoTokenizer cannot load ({' '.join(str(error).split())})"
    if theirs == ours:
        return ""
    return (
        f"; warning: AutoTokenizer takes {type(loaded).__name__} for this kind of model and makes other tokens than "
        "were trained, so load it with PreTrainedTokenizerFast.from_pretrained"
    )


def copy_tokenizer(directory: Path, data: DataConfig, model_path: str) -> None:
    """Put the run's tokeniser, its chat template and the model's generation settings beside an exported model, so that
    `AutoTokenizer.from_pretrained(directory)` gives the tokens that were trained.

    Raises:
        ConfigError: a file that cannot be copied any more.
    """
    source, home = tokenizer_source(data, model_path), model_directory(model_path)
    try:
        if home is not None:
            _copy(home / GENERATION_FILE, directory / GENERATION_FILE)
        if source is not None:
            _copy(source, directory / TOKENIZER_FILE)
            for name in _BESIDE_TOKENIZER:
                _copy(source.parent / name, directory / name)
            if (source.parent / _MORE_TEMPLATES).is_dir() and source.parent.resolve() != directory.resolve():
                shutil.copytree(source.parent / _MORE_TEMPLATES, directory / _MORE_TEMPLATES, dirs_exist_ok=True)
            _write_missing_config(directory, data)
        if data.chat_template is not None:
            _copy(Path(data.chat_template), directory / _TEMPLATE_FILE)
    except OSError as error:
        raise ConfigError(
            f"the model is exported to {directory}, but a file of its tokeniser could not be copied there: {error}; "
            "copy tokenizer.json and what lies beside it by hand"
        ) from error


def _copy(source: Path, target: Path) -> None:
    """Content only: the copy has the permissions of an ordinary new file."""
    if source.is_file() and source.resolve() != target.resolve():
        shutil.copyfile(source, target)


def _write_missing_config(directory: Path, data: DataConfig) -> None:
    """transformers chooses a class by the model where no file says that `tokenizer.json` is all there is."""
    if (directory / _CONFIG_FILE).exists():
        return
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    tokenizer = open_tokenizer(str(directory), data.eos_token)
    if isinstance(tokenizer, FileTokenizer) and tokenizer.eos_id is not None:
        settings["eos_token"] = tokenizer.token_text(tokenizer.eos_id) or ""
    (directory / _CONFIG_FILE).write_text(json.dumps(settings, indent=2) + "\n")
