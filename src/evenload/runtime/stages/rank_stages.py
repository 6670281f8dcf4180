"""`RankStages`: what one rank holds of the configured model, as stages that run packs and buffers that are summed."""

from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import torch
from transformers import PretrainedConfig

from evenload.attention.backends import select_backend
from evenload.attention.range_attention import RangeAttention
from evenload.config.train_config import TrainConfig
from evenload.hub.hub_files import local_path
from evenload.runtime.comm.mesh import Mesh
from evenload.runtime.model.configured import load_config, model_spec
from evenload.runtime.model.hf_model import StageModel, build_rank_models, build_stage_model
from evenload.runtime.model.supported import attention_soft_cap, router_aux_loss_coef
from evenload.runtime.optim.parameter_units import FlatBuffer, flatten_units, frozen_bytes
from evenload.runtime.replay.context_ring import require_no_window
from evenload.runtime.replay.stage import PipelineStage
from evenload.runtime.stages.same_revision import require_same_revision
from evenload.types.model import ModelSpec

Stage = TypeVar("Stage", bound=PipelineStage)


@dataclass(frozen=True, eq=False)
class RankStages(Generic[Stage]):
    """One rank's part of the model.

    Args:
        model: as the cost model sees it.
        stages: virtual stages by index, ascending.
        buffers: their trained parameters and gradients.
        frozen_bytes: of parameters that are not trained.
    """

    hf_config: PretrainedConfig
    model: ModelSpec
    stages: dict[int, Stage]
    buffers: list[FlatBuffer]
    frozen_bytes: int


@dataclass(frozen=True, eq=False)
class RankModels:
    """One rank's stages as modules with weights, by index, ascending, and what runs them."""

    hf_config: PretrainedConfig
    model: ModelSpec
    dtype: torch.dtype
    models: dict[int, StageModel]
    backend: RangeAttention


def build_rank_stages(
    config: TrainConfig, mesh: Mesh, stage_class: type[Stage] = PipelineStage, backend: RangeAttention | None = None
) -> RankStages[Stage]:
    """Make this rank's stages with their weights, and the configured attention or another. `ConfigError` or
    `UnsupportedModelError` where the model, its weights or its options cannot be trained like this."""
    built = build_models(config, mesh, backend)
    models = tuple(built.models.values())
    buffers = flatten_units(models, mesh.data_size)
    stages = {index: stage_class(part, built.backend, mesh.tensor) for index, part in built.models.items()}
    return RankStages(built.hf_config, built.model, stages, buffers, frozen_bytes(models))


def build_models(config: TrainConfig, mesh: Mesh, backend: RangeAttention | None = None) -> RankModels:
    """The modules of `build_rank_stages`; errors as there."""
    hf_config, model = load_config(config.model.path), model_spec(config)
    dtype: torch.dtype = getattr(torch, config.model.dtype)
    path, is_random = config.model.path, config.model.random_init
    folder = local_path(path, "model.path", "settings" if is_random else "weights")
    require_same_revision(path, folder, mesh)
    if config.parallel.cp_exchange == "ring":
        require_no_window(max(model.windows))
    build = partial(
        build_stage_model,
        tp_rank=mesh.tp_rank,
        dtype=dtype,
        device=mesh.device,
        weights=None if is_random else folder,
        seed=config.train.seed,
        lora=config.model.lora,
        router_aux_loss_coef=router_aux_loss_coef(hf_config, config.model.router_aux_loss_coef),
    )
    models = build_rank_models(hf_config, mesh.layout, mesh.pp_rank, build)
    if backend is None:
        backend = select_backend(
            config.train.attention,
            mesh.device.type,
            attention_soft_cap(hf_config),
            dtype=dtype,
            head_dim=model.head_dim,
        )
    return RankModels(hf_config, model, dtype, models, backend)
