"""Weights of a stage's modules: from a Hugging Face directory, or from a seed.

In files every expert has three matrices of its own, in transformers' modules all experts of a layer are two tensors.
`stored_tensors` is the one place that knows: it names the parts of a parameter as files do, as views, so that reading
copies into them and export copies out of them.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from evenload.errors import ConfigError
from evenload.runtime.recipes import ExpertNames

_UNIT_OF_PREFIX = {"model.embed_tokens": 0, "model.norm": 1, "lm_head": 2}


def initialise_weights(whole: Any, modules: dict[str, nn.Module | None], seed: int) -> None:
    """Fill every unit by the model's own rules, from a seed of its own.

    Args:
        whole: the transformers model that the modules belong to.
        modules: by their name in the model; None is skipped.
    """
    tied = bool(whole.config.tie_word_embeddings)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for name, module in modules.items():
            if module is None or (name == "lm_head" and tied):
                continue
            torch.manual_seed(unit_seed(name, seed))
            for part in module.modules():
                whole._init_weights(part)


def unit_seed(prefix: str, seed: int) -> int:
    """The seed of a unit's random weights; depends on the unit and not on the layout."""
    index = _UNIT_OF_PREFIX[prefix] if prefix in _UNIT_OF_PREFIX else 3 + int(prefix.rsplit(".", 1)[1])
    return seed * 1_000_003 + index


def load_weights(
    modules: dict[str, nn.Module | None], directory: Path, *, tied: bool, experts: ExpertNames | None
) -> None:
    """Copy tensors from a Hugging Face safetensors directory into the modules.

    Args:
        modules: by their name in the model; None is skipped.
        tied: the head is the embedding.
        experts: names of experts in files.

    Raises:
        ConfigError: no safetensors there, or a tensor is missing or has another shape.
    """
    where = _tensor_files(directory)
    by_file: dict[str, list[tuple[str, Tensor]]] = {}
    for prefix, module in modules.items():
        if module is None or (prefix == "lm_head" and tied):
            continue
        for name, parameter in module.named_parameters(prefix=prefix):
            # A directory may also hold the fused tensors of transformers' modules.
            parts = [(name, parameter.detach())] if name in where else stored_tensors(name, parameter.detach(), experts)
            for stored, view in parts:
                if stored not in where:
                    raise ConfigError(
                        f"{directory}: no tensor '{stored}'; is this the directory of the configured model?"
                    )
                by_file.setdefault(where[stored], []).append((stored, view))
    with torch.no_grad():
        for file, wanted in by_file.items():
            with safe_open(directory / file, framework="pt") as tensors:
                for name, view in wanted:
                    tensor = tensors.get_tensor(name)
                    if tensor.shape != view.shape:
                        raise ConfigError(
                            f"{directory / file}: '{name}' has shape {tuple(tensor.shape)}, the model needs "
                            f"{tuple(view.shape)}"
                        )
                    view.copy_(tensor)


def stored_tensors(name: str, tensor: Tensor, experts: ExpertNames | None) -> Iterator[tuple[str, Tensor]]:
    """(name in files, view) of the parts of a parameter; itself for all but experts and what stands beside them."""
    if experts is None or ".mlp." not in name:
        yield name, tensor
        return
    stem, part = name.replace(".mlp.", f".{experts.block}.").rsplit(".", 1)
    if not stem.endswith(".experts"):
        yield f"{stem}.{part}", tensor
        return
    for index, weight in enumerate(tensor.unbind(0)):
        if part == "down_proj":
            yield f"{stem}.{index}.{experts.down}.weight", weight
        else:
            gate, up = weight.chunk(2, dim=0)
            yield f"{stem}.{index}.{experts.gate}.weight", gate
            yield f"{stem}.{index}.{experts.up}.weight", up


def fill_constants(modules: dict[str, nn.Module | None]) -> None:
    """Buffers that are in no file, and that a model built without memory has lost: Gemma's factor of embeddings."""
    for module in modules.values():
        if module is not None and isinstance(getattr(module, "embed_scale", None), Tensor):
            module.embed_scale.fill_(module.scalar_embed_scale)  # type: ignore[operator,union-attr]


def _tensor_files(directory: Path) -> dict[str, str]:
    """Tensor name -> file name."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        return json.loads(index.read_text())["weight_map"]
    single = directory / "model.safetensors"
    if not single.is_file():
        raise ConfigError(
            f"{directory}: neither model.safetensors nor model.safetensors.index.json; "
            "set model.random_init = true to train from scratch"
        )
    with safe_open(single, framework="pt") as tensors:
        return dict.fromkeys(tensors.keys(), single.name)
