"""Functions that run on every rank of a `GlooPool`."""

from contextlib import nullcontext
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from evenload.attention.range_attention import select_backend
from evenload.runtime.data_parallel import global_gradient_norm, reduce_gradients
from evenload.runtime.executor import Executor
from evenload.runtime.held_bytes import STORE_KINDS
from evenload.runtime.mesh import create_mesh
from evenload.runtime.parameter_units import flatten_units
from evenload.runtime.rank_model import build_rank_models
from evenload.runtime.recipes import attention_soft_cap
from evenload.runtime.stage import PipelineStage
from evenload.runtime.tensor_weights import join_parts, tensor_split
from evenload.types.plan import decode_plan
from reference_training import ROUNDS_TO_FLOAT32, balance_factor, exact_casts, tiny_config


class StoredBytes(NamedTuple):
    """The stores' own accounting of one rank: the peak, the peak of each kind, what is held after every action in all
    and by kind, the most in host memory, the most sent tensors a channel kept, and what came from ranks that share
    documents."""

    peak: int
    peak_by_kind: dict[str, int]
    after_actions: list[int]
    after_kinds: dict[str, list[int]]
    peak_host: int
    most_sends_kept: int
    context: int


def gradients_of_plans(
    kind: str, changes: dict, plans: list[bytes], tokens: list[dict], dtype: torch.dtype, sharing: dict
) -> list:
    """Run each plan's step on a fresh gradient; per plan this rank's (loss share, gradients, norm, weights, bytes of
    stored activations). `sharing`: the executor's arguments about shared documents."""
    with exact_casts(kind) if kind in ROUNDS_TO_FLOAT32 and dtype == torch.float64 else nullcontext():
        return _gradients_of_plans(kind, changes, plans, tokens, dtype, sharing)


def _gradients_of_plans(
    kind: str, changes: dict, plans: list[bytes], tokens: list[dict], dtype: torch.dtype, sharing: dict
) -> list:
    config = tiny_config(kind, **changes)
    decoded = [decode_plan(data) for data in plans]
    layout = decoded[0].layout
    mesh = create_mesh(layout, torch.device("cpu"), timeout_s=60)
    models = build_rank_models(
        config,
        layout=layout,
        pp_rank=mesh.pp_rank,
        tp_rank=mesh.tp_rank,
        dtype=dtype,
        device=mesh.device,
        weights=None,
        seed=3,
        router_aux_loss_coef=balance_factor(config),
    )
    buffers = flatten_units(tuple(models.values()), dp=mesh.data_size)
    backend = select_backend("auto", "cpu", attention_soft_cap(config))
    stages = {s: PipelineStage(model, backend, mesh.tensor) for s, model in models.items()}
    executor = Executor(stages, mesh, **sharing)
    results = []
    for plan, batch in zip(decoded, tokens, strict=True):
        for buffer in buffers:
            buffer.grads.zero_()
        run = executor.run(plan, executor.prepare(plan, {d: t.numpy().astype(np.int32) for d, t in batch.items()}))
        shards = reduce_gradients(buffers, mesh)
        norm = global_gradient_norm(buffers, shards, mesh)
        gradients, weights = {}, {}
        for buffer, shard in zip(buffers, shards, strict=True):
            flat = torch.empty_like(buffer.grads)
            if mesh.data_size > 1:
                dist.all_gather_single(flat, shard, group=mesh.data)
            else:
                flat.copy_(shard)
            start = 0
            for name, parameter in zip(buffer.names, buffer.parameters, strict=True):
                own, split = flat[start : start + parameter.numel()].view(parameter.shape), tensor_split(parameter)
                gradients[name] = join_parts(own, split, mesh.tensor).numpy().copy()
                value = join_parts(parameter.detach(), split, mesh.tensor)
                # numpy knows no bfloat16.
                weights[name] = (value.float() if value.dtype == torch.bfloat16 else value).numpy().copy()
                start += parameter.numel()
        by_kind = dict(zip(STORE_KINDS, run.trace.memory_kind_bytes.T.tolist(), strict=True))
        after = run.trace.memory_bytes.tolist()
        stored = StoredBytes(
            *(run.peak_bytes, run.peak_by_kind, after, by_kind),
            *(run.peak_host_bytes, run.most_sends_kept, run.context_bytes),
        )
        results.append((run.loss, gradients, norm, weights, stored))
    return results
