"""Read the `config.json` of the configured model, or of a built-in name (`evenload plan --model`), for transformers and
the cost model."""

from pathlib import Path

from transformers import AutoConfig, PretrainedConfig

from evenload.config.sections import with_adapters
from evenload.config.train_config import BYTES_PER_ELEMENT, TrainConfig
from evenload.data.hub import is_hub_name, local_path, model_from, model_from_config
from evenload.errors import ConfigError
from evenload.runtime.model.supported import own_key, require_positions, require_trainable
from evenload.types.model import CONFIGURATIONS, ModelSpec


def config_from(name_or_path: str) -> PretrainedConfig:
    """Return the configuration of a built-in model, a `config.json` or its folder; errors as `load_config`."""
    model_from(name_or_path)  # its errors name what is wrong
    if name_or_path not in CONFIGURATIONS:
        return load_config(name_or_path)
    config = AutoConfig.for_model(**CONFIGURATIONS[name_or_path])
    require_trainable(config)
    return config


def with_few_layers(config: PretrainedConfig, kinds: tuple[int, ...], stages: int, most: int) -> PretrainedConfig:
    """Return a copy with at most `most` layers a stage, alike on every stage, with one of each kind."""
    first_of_kind = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
    others = [layer for layer in range(len(kinds)) if layer not in first_of_kind]
    chosen = sorted((first_of_kind + others)[: max(len(first_of_kind), min(most, len(kinds) // stages))])
    tree = config.to_dict()
    tree[own_key(config, "num_hidden_layers")] = len(chosen) * stages
    for key, value in tree.items():
        if isinstance(value, list) and len(value) == len(kinds):  # `layer_types` and the like
            tree[key] = [value[layer] for layer in chosen] * stages
    if tree.get("max_window_layers") is not None:
        tree["max_window_layers"] = len(chosen) * stages
    if tree.get("first_k_dense_replace") is not None:
        tree["first_k_dense_replace"] = sum(layer < tree["first_k_dense_replace"] for layer in chosen)
    return type(config).from_dict(tree)


def spec_of(config: PretrainedConfig, name: str, bytes_per_element: int) -> ModelSpec:
    return model_from_config(config.to_dict(), name, bytes_per_element)


def load_config(path: str) -> PretrainedConfig:
    """Read the model's configuration from a directory, a `config.json`, or a name on the Hub; raise `ConfigError` where
    there is none, `UnsupportedModelError` for an architecture or option that replay does not run exactly."""
    local = Path(local_path(path, "model.path"))
    file = local / "config.json" if local.is_dir() else local
    if not file.is_file():
        raise ConfigError(
            f"model.path '{path}': no config.json there; give a Hugging Face directory, its config.json, or a "
            "name on the Hub such as 'Qwen/Qwen3-0.6B'"
        )
    try:
        # Code in a model's directory is never run.
        named = file.parent if file.name == "config.json" else file
        config = AutoConfig.from_pretrained(named, trust_remote_code=False)
    except Exception as error:  # transformers has no common class
        why = " ".join(str(error).split())
        raise ConfigError(f"model.path '{path}': transformers cannot read {file.name} ({why})") from error
    require_trainable(config)
    return config


def model_spec(config: TrainConfig) -> ModelSpec:
    """Return the configured model for the cost model; errors as `load_config` and `require_...` of `supported`."""
    hf = load_config(config.model.path)
    require_positions(hf, config.data.max_document_tokens)
    path = Path(config.model.path)
    name = path.parent.name if path.name == "config.json" else path.stem if path.suffix == ".json" else path.name
    name = config.model.path if is_hub_name(config.model.path) else name
    spec = model_from_config(hf.to_dict(), name, BYTES_PER_ELEMENT[config.model.dtype])
    return with_adapters(config.with_run_memory(spec), config.model.lora)
