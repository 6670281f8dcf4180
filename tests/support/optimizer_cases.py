"""Updates in bfloat16 with gradients that are given, as one rank of a `GlooPool` and as plain torch."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch

from evenload.config.train_config import TrainConfig, layout_of, load_train_config
from evenload.runtime.comm.mesh import create_meshes
from evenload.runtime.model.configured import load_config, model_spec
from evenload.runtime.model.hf_model import build_stage_model
from evenload.runtime.optim.optimizer import ShardedOptimizer
from evenload.runtime.optim.parameter_units import flatten_units
from gloo_pool import TIMEOUT_S
from switch_cases import whole_tensors
from training_cases import plain_model, plain_optimizers


def given_gradient(name: str, shape: Iterable[int], step: int) -> torch.Tensor:
    """Of a parameter in a step, fp32; the same everywhere."""
    seed = step * 1_000_003 + sum(map(ord, name)) * 101 + len(name)
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.1


def updated_in_bf16(config_file: str, overrides: list[str]) -> dict[str, np.ndarray]:
    """All tensors after the configured steps; of data-parallel ranks. bf16 as its bits."""
    config = load_train_config(Path(config_file), overrides)
    hf = load_config(config.model.path)
    mesh = create_meshes(
        [layout_of(config.parallel, model_spec(config).num_layers)], torch.device("cpu"), TIMEOUT_S
    ).start
    stage = build_stage_model(
        hf, layers=(0, hf.num_hidden_layers), dtype=torch.bfloat16, device=mesh.device, weights=None, seed=0
    )
    buffers = flatten_units(stage, mesh.data_size)
    optimizer = ShardedOptimizer(buffers, mesh, config.optimizer, average_decay=config.train.ema_decay)
    for step in range(config.train.steps or 0):
        for buffer in buffers:
            at = 0
            for name, parameter in zip(buffer.names, buffer.parameters, strict=True):
                gradient = given_gradient(name, parameter.shape, step).flatten()
                buffer.grads[at : at + gradient.numel()] = gradient
                at += gradient.numel()
        squares = sum(float(buffer.grads[: buffer.num_elements].double().square().sum()) for buffer in buffers)
        shards = [buffer.shard(buffer.grads, mesh.data_rank, mesh.data_size).clone() for buffer in buffers]
        optimizer.step(shards, squares**0.5, config.optimizer.rate(step, config.train.steps))
    optimizer.gathers.finish()
    return whole_tensors(buffers, optimizer, mesh)


def plainly_updated(config: TrainConfig) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The same by torch.optim on whole fp32 master weights: (these, their moving average), by name."""
    assert config.train.ema_decay is not None
    masters = plain_model(config, torch.bfloat16).float()
    named = dict(masters.named_parameters())
    averages = {name: parameter.detach().clone() for name, parameter in named.items()}
    optimizers = plain_optimizers(masters, config)
    for step in range(config.train.steps or 0):
        for name, parameter in named.items():
            parameter.grad = given_gradient(name, parameter.shape, step)
        torch.nn.utils.clip_grad_norm_(masters.parameters(), config.optimizer.clip_norm)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = config.optimizer.rate(step, config.train.steps)
            optimizer.step()
        for name, parameter in named.items():
            averages[name].lerp_(parameter.detach(), 1 - config.train.ema_decay)
    return {name: parameter.detach() for name, parameter in named.items()}, averages
