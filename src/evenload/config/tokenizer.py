"""Choose a run's tokeniser: the one that is set, else the model directory's, else plain bytes, which are refused for
pretrained weights unless the model's vocabulary is one of bytes (`MAX_BYTE_VOCABULARY`)."""

from pathlib import Path

import msgspec

from evenload.data.chat_encoding import open_encoder, stop_warnings
from evenload.data.config import DataConfig, mixture_configs, reads_token_ids
from evenload.data.hub import is_hub_name, local_path
from evenload.data.record_kinds import with_kinds
from evenload.data.tokenize import (
    BYTES,
    MAX_BYTE_VOCABULARY,
    ByteTokenizer,
    DocumentTokenizer,
    describe_tokenizer,
    open_tokenizer,
    read_settings,
)
from evenload.errors import ConfigError

TOKENIZER_FILE, GENERATION_FILE, MODEL_FILE = "tokenizer.json", "generation_config.json", "config.json"


def model_directory(model_path: str) -> Path | None:
    """Return a model's directory; None for a file that is no `config.json`, next to which anything may lie."""
    path = Path(local_path(model_path, "model.path"))
    if path.is_dir():
        return path
    return path.parent if path.name == MODEL_FILE else None


def with_default_tokenizer(data: DataConfig, model_path: str) -> DataConfig:
    """Name the model's tokeniser where none is named and text is to be tokenised; looks up nothing on the Hub."""
    if data.tokenizer is not None or reads_token_ids(data):
        return data
    if is_hub_name(model_path):
        return msgspec.structs.replace(data, tokenizer=model_path)
    directory = model_directory(model_path)
    if directory is not None and (directory / TOKENIZER_FILE).is_file():
        return msgspec.structs.replace(data, tokenizer=str(directory))
    return data


def with_found_kinds(data: DataConfig, model_path: str) -> DataConfig:
    """Resolve the kinds of record (`with_kinds`); ids that are found need no tokeniser that the model brought."""
    found = with_kinds(data)
    is_default = with_default_tokenizer(msgspec.structs.replace(data, tokenizer=None), model_path) == data
    has_found_ids = reads_token_ids(found) and not reads_token_ids(data)
    return msgspec.structs.replace(found, tokenizer=None) if has_found_ids and is_default else found


def require_tokenizer(data: DataConfig, pretrained: str | None, vocab_size: int) -> DocumentTokenizer:
    """Open the run's tokeniser and check all that depends on it: encoders, templates, ends of documents. Raises
    `ConfigError`: no such file or not a tokeniser, more ids than the model's vocabulary, or bytes for weights that are
    `pretrained` (a model's path; None = random ones); see also `open_encoder`."""
    tokenizer = open_tokenizer(data.tokenizer, data.eos_token)
    mean_nothing = pretrained is not None and vocab_size > MAX_BYTE_VOCABULARY
    if mean_nothing and isinstance(tokenizer, ByteTokenizer) and not reads_token_ids(data):
        unset = f"data.tokenizer is not set and {pretrained} holds no {TOKENIZER_FILE}"
        cause = f'data.tokenizer is "{BYTES}"' if data.tokenizer == BYTES else unset
        raise ConfigError(
            f"{cause}, so pretrained weights with a vocabulary of {vocab_size:,} ids (bytes fit at most "
            f"{MAX_BYTE_VOCABULARY}) would be trained on plain bytes, which mean nothing to them; set data.tokenizer "
            "to the model's tokeniser (AutoTokenizer.from_pretrained(DIRECTORY).save_pretrained(DIRECTORY) writes a "
            f"{TOKENIZER_FILE}), or model.random_init = true to train from scratch"
        )
    for part in mixture_configs(data):
        open_encoder(part, tokenizer, vocab_size)
    return tokenizer


def tokenizer_warnings(data: DataConfig, tokenizer: DocumentTokenizer, model_path: str) -> list[str]:
    """Warn of what a run's tokeniser and templates do not teach."""
    home = model_directory(model_path)
    files = [] if home is None else [home / GENERATION_FILE, home / MODEL_FILE]
    ends = next((ids for file in files if (ids := read_settings(file).get("eos_token_id")) is not None), None)
    return stop_warnings(data, tokenizer, ends)


def run_tokenizer_text(data: DataConfig, tokenizer: DocumentTokenizer, vocab_size: int) -> str:
    """Describe a run's tokeniser, for its first lines and its report."""
    if reads_token_ids(data):
        return f"none: records hold token ids, checked against the model's vocabulary of {vocab_size:,}"
    return describe_tokenizer(tokenizer)
