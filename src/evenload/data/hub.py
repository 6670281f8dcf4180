"""Find the files of a model by its name on the Hugging Face Hub, such as "Qwen/Qwen3-0.6B@revision", and its shape.

A path that exists is that path; files in the Hub's local cache are taken from there without the network; only then they
are downloaded into that cache. A name whose first part is a folder here is a mistyped path, and is never sent to the
Hub. Settings are small files; weights are fetched where they are wanted.
"""

import hashlib
import json
import logging
import os
import re
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import msgspec

from evenload.errors import ConfigError, did_you_mean
from evenload.types.model import CONFIGURATIONS, MODELS, ModelSpec

Wanted = Literal["settings", "tokenizer", "weights"]
_log = logging.getLogger("evenload.data")
_TOKENIZER_SETTINGS = "tokenizer_config.json"
_NAME = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w./-]+))?")
_FILE_ENDINGS = (".json", ".toml", ".jinja", ".txt", ".gz")
_SETTINGS = (
    "config.json", "generation_config.json", "tokenizer.json", _TOKENIZER_SETTINGS, "special_tokens_map.json",
    "added_tokens.json", "chat_template.jinja", "chat_template.json", "vocab.json", "merges.txt", "*.model",
    "additional_chat_templates/*", "adapter_config.json",
)  # fmt: skip
_NEEDED: dict[Wanted, str] = {
    "settings": "config.json",
    "tokenizer": "tokenizer.json",
    "weights": "whole set of config.json and safetensors files",
}
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json")


def is_hub_name(path: str) -> bool:
    """Tell whether a path names a model on the Hub: of that form, and no path that exists here."""
    if not _NAME.fullmatch(path) or path.endswith(_FILE_ENDINGS) or Path(path).exists():
        return False
    return not Path(path).parent.is_dir()


def local_path(path: str, setting: str, wanted: Wanted = "settings") -> str:
    """Return a path as it is; for a name on the Hub the folder of its files. `setting` is for messages."""
    named = _NAME.fullmatch(path)
    if named is None or not is_hub_name(path):
        return path
    hub: Any = import_module("huggingface_hub")
    request = {
        "repo_id": named["repo"],
        "revision": named["revision"],
        "allow_patterns": [*_SETTINGS, *(_WEIGHTS if wanted == "weights" else ())],
    }
    cause = None
    try:
        folder = _cached(hub, request, wanted) or hub.snapshot_download(**request)
        # Without a network this is what is in the cache, whole or not.
        if _is_usable(Path(folder), wanted):
            if wanted == "tokenizer" and not Path(folder, _TOKENIZER_SETTINGS).is_file():
                _log.warning(
                    "'%s' (revision %s) has no %s: the Hub has none, or cannot be reached. It names the token that "
                    "ends a document, which is guessed from the usual names; set data.eos_token to be sure",
                    path,
                    Path(folder).name,
                    _TOKENIZER_SETTINGS,
                )
            _log.info("%s '%s' is revision %s", setting, path, Path(folder).name)
            return folder
        why = f"its files have no {_NEEDED[wanted]}: there is no network, or the Hub has none under that name"
    except Exception as error:  # the Hub's client has no common class for what it raises
        cause, why = error, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    cache = import_module("huggingface_hub.constants").HF_HUB_CACHE
    revision = f" --revision {named['revision']}" if named["revision"] else ""
    raise ConfigError(
        f"{setting} '{path}' is no file or folder here; as a name on the Hugging Face Hub it is not in the local cache "
        f"({cache}) with its {wanted}, and cannot be downloaded ({why}). Where there is a network: hf download "
        f"{named['repo']}{revision} (hf auth login first, where required); then copy the cache here and set HF_HOME"
    ) from cause


def _cached(hub: Any, request: dict[str, Any], wanted: Wanted) -> str | None:
    try:
        folder = hub.snapshot_download(**request, local_files_only=True)
    except import_module("huggingface_hub.errors").LocalEntryNotFoundError:
        return None
    # Most tokenisers have settings, so where there are none they are requested from the Hub.
    lacks_settings = wanted == "tokenizer" and not Path(folder, _TOKENIZER_SETTINGS).is_file()
    return folder if _is_usable(Path(folder), wanted) and not lacks_settings else None


def _is_usable(folder: Path, wanted: Wanted) -> bool:
    if wanted == "tokenizer":
        return (folder / "tokenizer.json").is_file()
    if not (folder / "config.json").is_file():
        return False
    if wanted == "settings":
        return True
    if (index := folder / "model.safetensors.index.json").is_file():
        files = set(re.findall(r'"([^"/]+\.safetensors)"', index.read_text(encoding="utf-8")))
        return bool(files) and all((folder / name).is_file() for name in files)
    return any(folder.glob("*.safetensors"))


def model_from(name_or_path: str) -> ModelSpec:
    """Return a built-in model, or that of a Hugging Face `config.json` (the file, its folder, or a name on the Hub);
    `ConfigError` for anything else, which offers the nearest built-in name."""
    if name_or_path in MODELS:
        return MODELS[name_or_path]
    return model_from_config(*_configuration(name_or_path))


def context_limit(name_or_path: str) -> int | None:
    """Return the longest document that a model was made for, in tokens, as its configuration says; None where it does
    not. Raises as `model_from`."""
    tree = CONFIGURATIONS[name_or_path] if name_or_path in MODELS else _configuration(name_or_path)[0]
    text = tree.get("text_config") or tree
    return next(
        (text[key] for key in ("max_position_embeddings", "n_positions") if isinstance(text.get(key), int)), None
    )


def _configuration(name_or_path: str) -> tuple[dict[str, Any], str]:
    """Read a `config.json`; return it with the model's name."""
    path = Path(local_path(os.path.expanduser(name_or_path), "model"))
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise ConfigError(
            f"model '{name_or_path}' is no built-in name and no config.json; "
            f"{did_you_mean(name_or_path, MODELS, similarity=0.3)}known: {', '.join(MODELS)}"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"model {path} cannot be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"model {path} is not a JSON object; give a Hugging Face config.json")
    own_name = path.parent.name if path.name == "config.json" else ""
    return config, name_or_path if is_hub_name(name_or_path) else own_name or path.stem


_VERSION = 5  # Raise when models are read differently
_NOT_SHAPE = {"transformers_version", "_name_or_path", "architectures", "dtype", "torch_dtype"}
_read: dict[str, ModelSpec] = {}


def model_from_config(tree: Mapping[str, Any], name: str, bytes_per_element: int = 2) -> ModelSpec:
    """Return the model of a parsed Hugging Face `config.json`, of text and pictures the text part.

    It is read from the model that transformers builds of it, once: then it is known by its configuration in the user's
    cache (`$XDG_CACHE_HOME/evenload/models`, default `~/.cache`), where torch is not needed. `ConfigError`: it is not
    there, and torch and transformers are not installed, or they make no decoder of it. The name is for messages.
    """
    shape = {key: value for key, value in tree.items() if key not in _NOT_SHAPE}
    text = json.dumps([_VERSION, shape], sort_keys=True, default=str)
    digest = hashlib.sha256(text.encode()).hexdigest()[:24]
    if digest not in _read:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "evenload" / "models"
        # As the transformers that is installed builds it, without one as any did.
        own = cache / f"{digest}-{next((one.version for one in distributions(name='transformers')), '*')}.json"
        try:
            _read[digest] = msgspec.json.decode(max(cache.glob(own.name), default=own).read_bytes(), type=ModelSpec)
        except (OSError, msgspec.MsgspecError, ConfigError):  # it is read anew, and written
            _read[digest] = _described(tree, name, own)
    return msgspec.structs.replace(_read[digest], name=name, bytes_per_element=bytes_per_element)


def _described(tree: Mapping[str, Any], name: str, file: Path) -> ModelSpec:
    lacking = [package for package in ("torch", "transformers") if find_spec(package) is None]
    if lacking:
        raise ConfigError(
            f"model {name}: its config.json (model_type {tree.get('model_type')!r}) was not read here before, and that "
            f"needs {' and '.join(lacking)}: pip install 'evenload[train]', or copy {file} from where it was read, or "
            f"plan a built-in model: {', '.join(MODELS)}"
        )
    # Only here does planning need torch, and later runs do not.
    model: ModelSpec = import_module("evenload.runtime.model.model_config").described(tree, name)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(f".{os.getpid()}")
        partial.write_bytes(msgspec.json.encode(model))
        partial.replace(file)
    except OSError as error:
        _log.info("model %s will be read again next time: %s cannot be written (%s)", name, file, error)
    return model
