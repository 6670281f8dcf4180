"""The part of a decoder that one rank holds: a `StageModel` for each of its virtual stages.

A tied embedding whose first and last stage lie on one rank is one parameter there, as in the whole model.
"""

import torch
from transformers import PretrainedConfig

from evenload.runtime.config.lora_config import LoraConfig
from evenload.runtime.model.hf_model import StageModel, build_stage_model
from evenload.types.layout import ParallelLayout


def build_rank_models(
    config: PretrainedConfig,
    *,
    layout: ParallelLayout,
    pp_rank: int,
    tp_rank: int = 0,
    dtype: torch.dtype,
    device: torch.device,
    weights: str | None,
    seed: int,
    lora: LoraConfig | None = None,
    router_aux_loss_coef: float = 0.0,
) -> dict[int, StageModel]:
    """Models of a pipeline rank's virtual stages, ascending; arguments and errors as of `build_stage_model`."""
    models = {
        stage: build_stage_model(
            config,
            layers=layers,
            dtype=dtype,
            device=device,
            weights=weights,
            seed=seed,
            lora=lora,
            router_aux_loss_coef=router_aux_loss_coef,
            tp_rank=tp_rank,
            tp=layout.tp,
        )
        for stage, (layers, rank) in enumerate(zip(layout.stage_layers, layout.stage_to_rank, strict=True))
        if rank == pp_rank
    }
    if config.tie_word_embeddings and len(models) > 1 and {0, layout.num_stages - 1} <= models.keys():
        first, last = models[0], models[layout.num_stages - 1]
        assert first.embedding is not None
        assert last.head is not None
        last.head.weight, last.embedding = first.embedding.weight, None
    return models
