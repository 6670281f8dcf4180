"""`model_from`: the shape of a model by a built-in name, or read from its `config.json`, here or on the Hub."""

import json
import os
from pathlib import Path

from evenload.errors import ConfigError
from evenload.hub.hub_files import is_hub_name, local_path
from evenload.types.hf_config import model_from_hf_config
from evenload.types.model import ModelSpec
from evenload.types.model_catalog import MODELS
from evenload.types.nearest_name import did_you_mean


def model_from(name_or_path: str) -> ModelSpec:
    """A built-in model, or the model of a Hugging Face `config.json` (the file, the folder that holds it, or its name
    on the Hub).

    Raises:
        ConfigError: neither; the message offers the nearest built-in name. A name on the Hub that is not to be had.
    """
    if name_or_path in MODELS:
        return MODELS[name_or_path]
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
    name = path.parent.name if path.name == "config.json" and path.parent.name else path.stem
    name = name_or_path if is_hub_name(name_or_path) else name
    return model_from_hf_config(config, name)
