"""Weights of a stage's modules: from a Hugging Face directory, or from a seed."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from evenload.runtime.model.weight_files import StoredTensor, stored_parts
from evenload.types.architectures import ExpertNames

POSITIONS, EMBEDDING, NORM, HEAD, LAYERS = range(-1, 4)
"""Numbers of what has a seed of its own; layers follow from the last one on."""


def initialise_weights(whole: Any, number: int, unit: nn.Module, seed: int) -> None:
    """Fill a unit of a transformers model by the model's own rules, from a seed of its own."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(unit_seed(number, seed))
        # Children first: GPT-2's blocks fill a matrix of theirs again.
        unit.apply(whole._init_weights)


def unit_seed(number: int, seed: int) -> int:
    return seed * 1_000_003 + number


def load_weights(
    prefix: str, unit: nn.Module, directory: Path, stored: Mapping[str, StoredTensor], experts: ExpertNames | None
) -> None:
    """Copy the tensors that a Hugging Face directory has, after `require_fitting`, into a unit."""
    by_file: dict[str, list[tuple[str, Tensor]]] = {}
    for name, parameter in unit.named_parameters(prefix=prefix):
        for part, view in stored_parts(stored, name, parameter.detach(), experts):
            by_file.setdefault(stored[part].file, []).append((part, view))
    with torch.no_grad():
        for file, wanted in by_file.items():
            with safe_open(directory / file, framework="pt") as tensors:
                for name, view in wanted:
                    view.copy_(tensors.get_tensor(stored[name].name or name))


def fill_constants(unit: nn.Module) -> None:
    """Buffers that are in no file, and that a model built without memory has lost: Gemma's factor of embeddings."""
    if isinstance(getattr(unit, "embed_scale", None), Tensor):
        unit.embed_scale.fill_(unit.scalar_embed_scale)  # type: ignore[operator]
