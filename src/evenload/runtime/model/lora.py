"""Add LoRA adapters by `peft` to an unmodified decoder (Hu et al. 2022): only they are trained, saved and exported.

`peft` wraps a linear W as  W·x + (alpha / rank)·B·(A·x).  Replay records W·x as for a plain linear and computes the two
thin products again in backward, under autograd; W itself has no gradient, weight product or optimizer state.
"""

import contextlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from evenload.config.sections import LoraConfig, target_linears
from evenload.errors import ConfigError, UnsupportedModelError
from evenload.runtime.model.export_files import save_tensors
from evenload.runtime.model.structure import Structure, linear_kind
from evenload.runtime.model.weight_files import LAYERS, read_header, require_plain, unit_seed

ADAPTER_PARTS = ("lora_A", "lora_B")
_ADAPTER = "default"
_CONFIG_FILE, _WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
# Keys that do not change what an adapter computes, or that its tensors tell. All others are refused where they are set.
_HARMLESS = {
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode", "r",
    "target_modules", "exclude_modules", "lora_alpha", "lora_dropout", "layers_to_transform", "layers_pattern",
    "megatron_core", "qalora_group_size", "eva_config", "ensure_weight_tying", "fan_in_fan_out",
}  # fmt: skip
# Where a PEFT file's names begin: its own wrapper, then the model.
_PEFT_PREFIX = "base_model.model."


def add_adapters(
    model: PreTrainedModel,
    units: Iterable[nn.Module],
    structure: Structure,
    layers: Mapping[int, nn.Module],
    lora: LoraConfig,
    seed: int,
) -> None:
    """Put adapters into the linears of layers and freeze everything else, in place.

    Args:
        model: the whole one, of which only the configuration is read.
        units: all modules of a stage, the layers among them.
        layers: filled layers by index, whose adapters get values: A from a seed of the layer, B zeros.

    Raises:
        ConfigError: `peft` is missing, a target module that no layer has or that `peft` would not find again, no linear
            at all, or an adapter file that does not fit.
    """
    _require_loadable(model, structure, lora)
    for unit in units:
        unit.requires_grad_(False)
    for index, layer in layers.items():
        inject_adapters(layer, index, structure, lora)
        prefix = structure.layer_path(index)
        adapters = {f"{prefix}.{name}": p for name, p in layer.named_parameters() if is_adapter(name)}
        if lora.path is None:
            _initialise(adapters, unit_seed(LAYERS + index, seed))
        else:
            _load(adapters, Path(lora.path), lora, structure)


def inject_adapters(layer: nn.Module, index: int, structure: Structure, lora: LoraConfig) -> None:
    """Put adapters without values into those linears of a layer that every token goes through once; errors as above."""
    from peft import inject_adapter_in_model

    kinds = _target_kinds(structure, lora)
    targets = [name for name in structure.sites[index].linears if linear_kind(name) in kinds]
    config = _peft_config(lora, targets)
    config.fan_in_fan_out = any(isinstance(layer.get_submodule(name), Conv1D) for name in targets)
    if targets:
        inject_adapter_in_model(config, layer, adapter_name=_ADAPTER)


def _target_kinds(structure: Structure, lora: LoraConfig) -> list[str]:
    known = {linear_kind(name): name for sites in structure.sites for name in sorted(sites.linears)}
    if not known:
        raise ConfigError("model.lora is set, and no token goes through a linear of its layers once; remove model.lora")
    return target_linears(known, lora)


def _require_loadable(model: PreTrainedModel, structure: Structure, lora: LoraConfig) -> None:
    """Refuse targets that `peft` takes for matrices of experts, among which transformers has fused those of files."""
    try:
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
    except ImportError as error:
        raise ConfigError("model.lora needs the package peft: pip install 'evenload[hf]'") from error
    kinds, kept = _target_kinds(structure, lora), []
    for kind in kinds:
        config = _peft_config(lora, [kind])
        with contextlib.suppress(ValueError):  # some of what is fused
            convert_peft_config_for_transformers(config, model, None)
            kept += [kind for one in config.target_modules if one == kind]  # type: ignore[union-attr]
    if taken := [kind for kind in kinds if kind not in kept]:
        raise ConfigError(
            f"model.lora trains {', '.join(taken)} of layers beside experts, and peft would load such an adapter into "
            f"the experts of a {model.config.model_type}; set model.lora.target_modules = {json.dumps(kept)}"
        )


def is_adapter(module_name: str) -> bool:
    return any(part in ADAPTER_PARTS for part in module_name.split("."))


def _peft_config(lora: LoraConfig, targets: list[str], model_path: str | None = None) -> Any:
    from peft import LoraConfig as PeftLoraConfig
    from peft import TaskType

    return PeftLoraConfig(
        task_type=TaskType.CAUSAL_LM,
        base_model_name_or_path=model_path,
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        target_modules=targets,
        lora_dropout=0.0,
        bias="none",
    )


def _initialise(parameters: dict[str, nn.Parameter], seed: int) -> None:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        for name, parameter in parameters.items():
            if ".lora_A." in name:
                nn.init.kaiming_uniform_(parameter, a=5**0.5)
            else:
                nn.init.zeros_(parameter)


def _load(parameters: dict[str, nn.Parameter], directory: Path, lora: LoraConfig, structure: Structure) -> None:
    if not (directory / _CONFIG_FILE).is_file() or not (directory / _WEIGHTS_FILE).is_file():
        raise ConfigError(f"model.lora.path '{directory}': no {_CONFIG_FILE} and {_WEIGHTS_FILE} there")
    stored = read_header(directory / _WEIGHTS_FILE)
    try:
        saved = json.loads((directory / _CONFIG_FILE).read_bytes())
        rank, alpha = saved["r"], float(saved["lora_alpha"])
    except (ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            f"{directory / _CONFIG_FILE} is no configuration of a LoRA adapter ({type(error).__name__}: {error}); "
            "fetch it again"
        ) from error
    _refuse_other_adapters(saved, directory)
    if (rank, alpha) != (lora.rank, lora.alpha):
        raise ConfigError(
            f"model.lora.path '{directory}' has rank {rank} and alpha {alpha}, model.lora.rank is "
            f"{lora.rank} and model.lora.alpha {lora.alpha}; they must be the same"
        )
    wanted = {peft_name(name): parameter for name, parameter in parameters.items()}
    path = re.compile(rf"{re.escape(structure.layers)}\.(\d+)\.")
    here, num_layers = {path.match(name)[1] for name in parameters}, structure.num_layers  # type: ignore[index]
    for name, tensor in sorted(stored.items()):
        layer = path.search(name)
        if name not in wanted and (layer is None or layer.group(1) in here or int(layer.group(1)) >= num_layers):
            raise ConfigError(f"{directory}: '{name}' is not among model.lora.target_modules of {num_layers} layers")
        require_plain(tensor, name, directory)
    with safe_open(directory / _WEIGHTS_FILE, framework="pt") as tensors, torch.no_grad():
        for name, parameter in wanted.items():
            if name not in stored:
                raise ConfigError(f"{directory}: no tensor '{name}'; does model.lora.target_modules fit this adapter?")
            tensor = tensors.get_tensor(name)
            if tensor.shape != parameter.shape:
                ours = tuple(parameter.shape)
                raise ConfigError(f"{directory}: '{name}' has shape {tuple(tensor.shape)}, the model needs {ours}")
            parameter.copy_(tensor)


def _refuse_other_adapters(saved: dict[str, Any], directory: Path) -> None:
    """Refuse variants that compute something else than W·x + (alpha / rank)·B·(A·x)."""
    plain: dict[str, tuple[object, ...]] = {
        "peft_type": ("LORA",),
        "bias": ("none", None),
        # Others begin by changing the model's own weights.
        "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva"),
    }
    for key, value in saved.items():
        if value not in plain[key] if key in plain else bool(value) and key not in _HARMLESS:
            raise UnsupportedModelError(f"{directory / _CONFIG_FILE}: {key} is {value}; only plain LoRA is trained")


def peft_name(name: str) -> str:
    """Return a parameter's name in a PEFT file, which leaves the adapter's name out."""
    return _PEFT_PREFIX + name.replace(f".{_ADAPTER}.", ".")


def write_adapter(directory: Path, tensors: dict[str, Tensor], lora: LoraConfig, model_path: str) -> None:
    """Write a PEFT directory that `PeftModel.from_pretrained(base, directory)` loads; tensors by name in the model."""
    directory.mkdir(parents=True, exist_ok=True)
    targets = sorted({name.split(".lora_")[0].rsplit(".", 1)[1] for name in tensors})
    config = _peft_config(lora, targets, model_path)
    config.inference_mode = True
    config.save_pretrained(str(directory))
    contiguous = {peft_name(name): tensor.contiguous() for name, tensor in tensors.items()}
    save_tensors(contiguous, directory / _WEIGHTS_FILE)
