"""`RankStages`: what one rank holds of the configured model, as stages that run packs and flat buffers.

A run whose layout changes makes all modules at its start (`unit_modules`), so that a switch builds none; those of units
that the rank does not hold are shells, whose parameters have no elements until the unit comes (`twin_layer`).
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from transformers import PretrainedConfig

from evenload.attention.backends import select_backend
from evenload.attention.range_attention import RangeAttention
from evenload.config.sections import LoraConfig, RunConfig, uses_liger
from evenload.config.train_config import ModelConfig
from evenload.data.hub import local_path
from evenload.errors import ConfigError
from evenload.runtime.comm.mesh import Mesh
from evenload.runtime.model.around import WholeModel
from evenload.runtime.model.hf_model import (
    StageModel,
    build_rank_models,
    build_stage_model,
    empty_model,
    numbered_units,
)
from evenload.runtime.model.lora import inject_adapters
from evenload.runtime.model.model_config import load_config, router_aux_loss_coef
from evenload.runtime.model.tensor_weights import split_weights
from evenload.runtime.model.weight_files import empty_parameters, fill_buffers
from evenload.runtime.optim.parameter_units import FlatBuffer, flatten_units, frozen_bytes
from evenload.runtime.replay.stage import PipelineStage
from evenload.types.layout import ParallelLayout
from evenload.types.model import ModelSpec


def require_same_revision(path: str, folder: str, mesh: Mesh) -> None:
    """Raise `ConfigError` on all ranks where their `folder`s are of different revisions of `path`. Collective."""
    mine = None if folder == path else Path(folder).name  # a folder of a cache is called as the revision is
    everyone: list[str | None] = [None] * mesh.num_ranks
    dist.all_gather_object(everyone, mine, group=mesh.control)
    if len(set(everyone)) == 1:
        return
    named = "; ".join(
        f"{one or 'a folder of that name'} on ranks {[rank for rank, other in enumerate(everyone) if other == one]}"
        for one in dict.fromkeys(everyone)
    )
    first = next(one for one in everyone if one is not None)
    raise ConfigError(
        f"model.path '{path}' is not the same on all ranks: {named}; name one revision, such as model.path = "
        f'"{path.partition("@")[0]}@{first}", or give a folder that all machines reach'
    )


def unit_modules(
    models: Collection[StageModel],
    *,
    dtype: torch.dtype,
    device: torch.device,
    lora: LoraConfig | None,
    tp_rank: int,
    tp: int,
) -> tuple[StageModel, frozenset[int]]:
    """Return the whole model, with the units of a rank's stages as they are and shells for all others, and the ids of
    parameters with values. Of a tied model embedding and head have one weight."""
    some = next(iter(models))
    structure, model = some.structure, empty_model(some.config, dtype)
    fill_buffers(model, device)
    layers = [structure.layer_path(index) for index in range(structure.num_layers)]
    held = {path: unit for stage in models for _, path, unit in numbered_units(stage)}
    shells = {
        path: model.get_submodule(path)
        for path in (*structure.prologue, *layers, *structure.epilogue)
        if path not in held
    }
    # Memory that nothing touches is not taken: sizes come from it, then it goes (`twin_layer`). A GPU's would be.
    for path, unit in shells.items():
        empty_parameters(unit, "cpu")
        if lora is not None:
            unit.requires_grad_(False)
            if path in layers:
                with torch.random.fork_rng(devices=[]):
                    inject_adapters(unit, layers.index(path), structure, lora)
    for path, unit in held.items():
        model.set_submodule(path, unit)
    if structure.is_tied:
        words, head = model.get_submodule(structure.embedding), model.get_submodule(structure.head)
        words.weight = head.weight = (head if structure.head in held else words).weight
    if tp > 1:
        split_weights(shells.items(), structure, tp_rank, tp, filled=False)
    for index, layer in some.whole.layers.items():
        # Of weights that are loaded, biases that choose experts: every rank has them.
        for name, buffer in layer.named_buffers(prefix=structure.layer_path(index)):
            model.get_buffer(name).copy_(buffer)
    parts = WholeModel(model, structure.layers, structure.prologue, returns_tuple=structure.returns_tuple)
    whole = replace(
        some,
        whole=parts,
        layers=parts.layers,
        prologue=parts.modules,
        epilogue={path: model.get_submodule(path) for path in structure.epilogue},
    )
    if some.liger:
        whole.use_liger(tp)
    return whole, frozenset(id(parameter) for unit in held.values() for parameter in unit.parameters())


def stage_models(whole: StageModel, layout: ParallelLayout, pp_rank: int) -> dict[int, StageModel]:
    """Return the virtual stages of a pipeline rank in a layout, as `build_rank_models` makes them."""
    models: dict[int, StageModel] = {}
    for stage in layout.stages_of_rank(pp_rank):
        models[stage] = replace(
            whole,
            layers={index: whole.layers[index] for index in range(*layout.stage_layers[stage])},
            prologue=whole.prologue if stage == 0 else {},
            epilogue=whole.epilogue if stage == layout.num_stages - 1 else {},
        )
    return models


Stage = TypeVar("Stage", bound=PipelineStage)


@dataclass(frozen=True, eq=False)
class RankStages(Generic[Stage]):
    """Holds one rank's part of the model: virtual stages by index, ascending, and their trained parameters."""

    hf_config: PretrainedConfig
    stages: dict[int, Stage]
    buffers: list[FlatBuffer]
    frozen_bytes: int


def build_rank_stages(
    model: ModelConfig,
    run: RunConfig,
    spec: ModelSpec,
    mesh: Mesh,
    stage_class: type[Stage] = PipelineStage,
    backend: RangeAttention | None = None,
    *,
    unit_gradients: bool = False,
) -> RankStages[Stage]:
    """Make this rank's stages with weights. `ConfigError`, `UnsupportedModelError`: they cannot be trained so."""
    hf_config, parts, backend = build_models(model, run, spec, mesh, backend)
    models = tuple(parts.values())
    buffers = flatten_units(models, mesh.data_size, unit_gradients=unit_gradients)
    stages = {index: stage_class(part, backend, mesh.tensor) for index, part in parts.items()}
    return RankStages(hf_config, stages, buffers, frozen_bytes(models))


def build_models(
    model: ModelConfig, run: RunConfig, spec: ModelSpec, mesh: Mesh, backend: RangeAttention | None = None
) -> tuple[PretrainedConfig, dict[int, StageModel], RangeAttention]:
    """Make the modules of `build_rank_stages`, by index of stage, ascending, and what runs them; errors as there."""
    hf_config = load_config(model.path)
    dtype = dtype_of(model)
    folder = local_path(model.path, "model.path", "settings" if model.random_init else "weights")
    require_same_revision(model.path, folder, mesh)
    build = partial(
        build_stage_model,
        tp_rank=mesh.tp_rank,
        dtype=dtype,
        device=mesh.device,
        weights=None if model.random_init else folder,
        seed=run.seed,
        lora=model.lora,
        router_aux_loss_coef=router_aux_loss_coef(hf_config, model.router_aux_loss_coef),
    )
    if backend is None:
        backend = select_backend(run.attention, mesh.device.type, dtype=dtype, head_dim=spec.head_dim)
    parts = build_rank_models(mesh.layout, mesh.pp_rank, partial(build, hf_config))
    for part in parts.values() if uses_liger(run, model.dtype) else ():
        part.use_liger(mesh.layout.tp)
    return hf_config, parts, backend


def dtype_of(model: ModelConfig) -> torch.dtype:
    return getattr(torch, model.dtype)
