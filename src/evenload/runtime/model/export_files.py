"""Write the files of an exported model besides its index: tensors that others may read, and the tokeniser."""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from safetensors.torch import save_file
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from evenload.config.tokenizer import GENERATION_FILE, MODEL_FILE, TOKENIZER_FILE, model_directory
from evenload.data.chat_encoding import CHATML, CHATML_SOURCE
from evenload.data.config import DataConfig, reads_token_ids
from evenload.data.hub import local_path
from evenload.data.tokenize import (
    BYTES,
    SPECIAL_TOKENS_MAP,
    TOKENIZER_CONFIG,
    ByteTokenizer,
    DocumentTokenizer,
    FileTokenizer,
    post_processor_ids,
    read_settings,
    required_opening,
)
from evenload.errors import ConfigError
from evenload.runtime.model.weight_files import INDEX_FILE

SHARD_BYTES = 5 * 10**9
"""Of a file of weights, and about what a rank needs in host memory to write it."""
_TEMPLATE_FILE = "chat_template.jinja"
_BESIDE_TOKENIZER = (
    TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP, "added_tokens.json", _TEMPLATE_FILE, "chat_template.json", "vocab.json",
    "merges.txt", "tokenizer.model", "spiece.model",
)  # fmt: skip
_MORE_TEMPLATES = "additional_chat_templates"
# What tokenisers split differently: digits, contractions, runs of white space, other scripts.
_FAST = "PreTrainedTokenizerFast"
_PROBE = "Chapter 12: it's 2048 words, don't  they\n\n\tsay? naïve 東京 x=[1,2,3];\n"


def save_tensors(tensors: dict[str, Tensor], file: Path) -> None:
    """Write a safetensors file with the permissions of an ordinary new file, which safetensors' own lack."""
    file.unlink(missing_ok=True)
    file.touch()
    mode = file.stat().st_mode
    save_file(tensors, file, metadata={"format": "pt"})
    os.chmod(file, mode)


def shard_units(sizes_bytes: Sequence[int]) -> list[list[int]]:
    """Divide units, in order, into files of at most `SHARD_BYTES`, but one unit at least; return their numbers."""
    shards: list[list[int]] = []
    free_bytes = 0
    for unit, size_bytes in enumerate(sizes_bytes):
        if not shards or size_bytes > free_bytes:
            shards.append([])
            free_bytes = SHARD_BYTES
        shards[-1].append(unit)
        free_bytes -= size_bytes
    return shards


def write_index(directory: Path, places: Mapping[str, tuple[str, int]]) -> None:
    """Write the index of a directory's tensors, of which (file, bytes) is given, and remove files of earlier ones."""
    index = {
        "metadata": {"total_size": sum(size for _, size in places.values())},
        "weight_map": {name: file for name, (file, _) in sorted(places.items())},
    }
    (directory / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
    written = {file for file, _ in places.values()}
    for file in directory.glob("model-*-of-*.safetensors"):
        if file.name not in written:
            file.unlink()


def tokenizer_source(data: DataConfig, model_path: str) -> Path | None:
    """Return the `tokenizer.json` of a trained model, of token ids the model's own; None = there is none."""
    if data.tokenizer in (None, BYTES) and not reads_token_ids(data):
        return None
    named = None if data.tokenizer in (None, BYTES) else local_path(data.tokenizer, "data.tokenizer", "tokenizer")
    path = model_directory(model_path) if named is None else Path(named)
    if path is None:
        return None
    file = path / TOKENIZER_FILE if path.is_dir() else path
    return file if file.is_file() else None


def exported_tokenizer_note(directory: Path, data: DataConfig, model_path: str) -> str:
    """Describe an exported model's tokeniser, for a log, with a warning where transformers would load another one."""
    if (source := tokenizer_source(data, model_path)) is not None:
        return f"with the tokeniser of {source.parent}{_difference(directory, FileTokenizer(source), data)}"
    return f"without a tokeniser: {'records hold token ids' if reads_token_ids(data) else 'it trained on plain bytes'}"


def require_same_token_ids(tokenizer: DocumentTokenizer) -> None:
    """Raise `ConfigError` for settings by which transformers makes other ids than `tokenizer.json` says. Its class
    `PreTrainedTokenizerFast` takes the file as it is, as we do; others rebuild parts of it from their own settings."""
    if not isinstance(tokenizer, FileTokenizer) or not tokenizer.has_settings or tokenizer.path.name != TOKENIZER_FILE:
        return
    directory = tokenizer.path.parent
    named = read_settings(directory / TOKENIZER_CONFIG).get("tokenizer_class", _FAST)
    try:
        loader = PreTrainedTokenizerFast if named in (_FAST, "TokenizersBackend") else AutoTokenizer
        loaded, is_same = _compared(tokenizer, tokenizer.opening_ids, loader, directory)
    except Exception:  # transformers has no common class; what it cannot load cannot differ
        return
    if not is_same:
        raise ConfigError(
            f"transformers loads the tokeniser of {directory} as {type(loaded).__name__} (tokenizer_class in "
            f"{TOKENIZER_CONFIG}: '{named}'), which makes other ids than {TOKENIZER_FILE} says. To train with the "
            f"latter, set tokenizer_class there to '{_FAST}'; to train with the former, write what it makes by "
            "AutoTokenizer.from_pretrained(DIRECTORY).save_pretrained(OTHER), and set data.tokenizer to OTHER"
        )


def _compared(ours: FileTokenizer, opening: tuple[int, ...], loader: Any, directory: Path) -> tuple[Any, bool]:
    """Load a directory's tokeniser with transformers; say whether it makes our ids of a probe text after `opening`."""
    loaded = loader.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
    added = sorted(ours.added_tokens | set(loaded.get_added_vocab()))
    text = _PROBE + "".join(f"a{token}b {token} c" for token in added)
    whole = [*opening, *ours.encode_batch([text])[0].tolist()]
    try:
        return loaded, loaded(text, verbose=False)["input_ids"][: len(whole)] == whole
    except Exception:  # its class looks for tokens that the vocabulary lacks
        return loaded, False


def _difference(directory: Path, trained: FileTokenizer, data: DataConfig) -> str:
    """Return a warning where transformers' class for the model splits text differently, whatever the file says."""
    try:
        opening = required_opening(trained, data.prepend_bos)
        loaded, is_same = _compared(trained, opening, AutoTokenizer, directory)
    except Exception as error:  # transformers has no common class
        return f", which transformers' AutoTokenizer cannot load ({' '.join(str(error).split())})"
    if is_same:
        return ""
    return (
        f"; warning: AutoTokenizer takes {type(loaded).__name__} for this kind of model and makes other tokens than "
        "were trained, so load it with PreTrainedTokenizerFast.from_pretrained"
    )


def copy_tokenizer(directory: Path, data: DataConfig, model_path: str) -> None:
    """Copy the run's tokeniser, its chat template and the model's generation settings to an exported model, whose
    generation ends with the token that ended documents. `ConfigError`: a file cannot be copied any more."""
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
            _write_settings(directory, data)
        ended = ByteTokenizer() if source is None else FileTokenizer(directory, data.eos_token)
        # Records of ids were ended by someone else.
        if ended.eos_id is not None and (data.eos_token is not None or not reads_token_ids(data)):
            _write_end(directory, ended.eos_id)
        if data.chat_template == CHATML:
            (directory / _TEMPLATE_FILE).write_text(CHATML_SOURCE)
        elif data.chat_template is not None:
            _copy(Path(data.chat_template), directory / _TEMPLATE_FILE)
    except OSError as error:
        raise ConfigError(
            f"the model is exported to {directory}, but a file of its tokeniser could not be copied there: {error}; "
            "copy tokenizer.json and what lies beside it by hand"
        ) from error


def _copy(source: Path, target: Path) -> None:
    if source.is_file() and source.resolve() != target.resolve():
        shutil.copyfile(source, target)


def _write_settings(directory: Path, data: DataConfig) -> None:
    """Write the end of a document, and the beginning of a text, where the data settings change them."""
    tokenizer = FileTokenizer(directory, data.eos_token)
    own = read_settings(directory / TOKENIZER_CONFIG)
    # transformers chooses a class by the model where no file says that `tokenizer.json` is all there is.
    changed = {} if own else {"tokenizer_class": _FAST}
    if tokenizer.eos_id is not None and (data.eos_token is not None or not own):
        changed["eos_token"] = tokenizer.token_text(tokenizer.eos_id) or ""
    _update(directory / TOKENIZER_CONFIG, changed)
    if (directory / SPECIAL_TOKENS_MAP).is_file():
        _update(directory / SPECIAL_TOKENS_MAP, {key: text for key, text in changed.items() if key == "eos_token"})
    opening = required_opening(tokenizer, data.prepend_bos)
    if opening != tokenizer.opening_ids:
        backend = tokenizers.Tokenizer.from_file(str(tokenizer.path))
        before, after = (
            [(tokenizer.token_text(index) or "", index) for index in ids]
            for ids in (opening, post_processor_ids(backend)[1])
        )
        pieces = [*(text for text, _ in before), "$A", *(text for text, _ in after)]
        backend.post_processor = TemplateProcessing(single=pieces, special_tokens=[*before, *after])
        backend.save(str(tokenizer.path))


def _write_end(directory: Path, eos_id: int) -> None:
    """Add an end of generation to the known ones, in generation_config.json and in config.json, its fallback."""
    for name in (MODEL_FILE, GENERATION_FILE):
        known = (before := read_settings(directory / name)).get("eos_token_id")
        ends = known if isinstance(known, list) else [known]
        if before and eos_id not in ends:
            # A single end in config.json is the one of the model, which gives way.
            kept = ends if known is not None and (name == GENERATION_FILE or isinstance(known, list)) else []
            _update(directory / name, {"eos_token_id": [eos_id, *kept] if kept else eos_id})


def _update(file: Path, changed: dict[str, Any]) -> None:
    settings = read_settings(file)
    if settings | changed != settings:
        file.write_text(json.dumps(settings | changed, indent=2) + "\n")
