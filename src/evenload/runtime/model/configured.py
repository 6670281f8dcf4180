"""The configured model's `config.json`, as transformers and as the cost model read it."""

from pathlib import Path

from transformers import AutoConfig, PretrainedConfig

from evenload.config.sections import with_adapters
from evenload.config.train_config import BYTES_PER_ELEMENT, TrainConfig
from evenload.data.hub import is_hub_name, local_path
from evenload.errors import ConfigError
from evenload.runtime.model.supported import check_supported, require_adapters, require_positions
from evenload.types.model import ModelSpec, model_from_hf_config


def load_config(path: str) -> PretrainedConfig:
    """Return the model's configuration from a directory, a `config.json`, or a name on the Hub; a `ConfigError` where
    there is none, an `UnsupportedModelError` for an architecture or option that replay does not run exactly."""
    local = Path(local_path(path, "model.path"))
    file = local / "config.json" if local.is_dir() else local
    if not file.is_file():
        raise ConfigError(
            f"model.path '{path}': no config.json there; give a Hugging Face directory, its config.json, or a "
            "name on the Hub such as 'Qwen/Qwen3-0.6B'"
        )
    try:
        # Code that a directory brings along is never run.
        config = AutoConfig.from_pretrained(
            file.parent if file.name == "config.json" else file, trust_remote_code=False
        )
    except Exception as error:  # transformers has no common class
        raise ConfigError(
            f"model.path '{path}': transformers cannot read {file.name} ({' '.join(str(error).split())})"
        ) from error
    check_supported(config)
    return config


def model_spec(config: TrainConfig) -> ModelSpec:
    """Return the configured model as the cost model sees it; errors as `load_config`, and a `ConfigError` for documents
    longer than its learned positions, or adapters that fit nowhere."""
    hf = load_config(config.model.path)
    require_positions(hf, config.data.max_document_tokens)
    if config.model.lora is not None:
        require_adapters(hf)
    path = Path(config.model.path)
    name = path.parent.name if path.name == "config.json" else path.stem if path.suffix == ".json" else path.name
    name = config.model.path if is_hub_name(config.model.path) else name
    found = model_from_hf_config(hf.to_dict(), name, BYTES_PER_ELEMENT[config.model.dtype])
    return with_adapters(config.with_run_memory(found), config.model.lora)
