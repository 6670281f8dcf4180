"""Functions that run on every rank of a `GlooPool`."""

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from evenload.attention.backends import select_backend
from evenload.config.sections import LoraConfig
from evenload.runtime.comm.collectives import all_gather_single
from evenload.runtime.comm.mesh import ChannelMode, Mesh, create_meshes
from evenload.runtime.executor import Executor, RankRun, forward_losses
from evenload.runtime.model.hf_model import build_rank_models, build_stage_model
from evenload.runtime.model.supported import attention_soft_cap
from evenload.runtime.model.tensor_weights import join_parts, tensor_split
from evenload.runtime.optim.data_parallel import GradientReduction, WeightGathers
from evenload.runtime.optim.parameter_units import flatten_units
from evenload.runtime.replay.held_bytes import STORE_KINDS
from evenload.runtime.replay.rank_packs import RankStep
from evenload.runtime.replay.stage import OnFinal, PipelineStage
from evenload.runtime.step_source import prepare_step
from evenload.stepplan.plan_file import forward_only
from evenload.types.plan import StepPlan, decode_plan
from gloo_pool import TIMEOUT_S
from reference_training import balance_factor, tiny_config
from spoiled_copies import SpoiledHostCopies
from staged_group import NAME, register_staged


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
    kind: str,
    changes: dict,
    plans: list[bytes],
    tokens: list[dict],
    dtype: torch.dtype,
    exchange: str,
    channels: ChannelMode = "directed",
    staged_on: str | None = None,
) -> list:
    """Run each plan's step on a fresh gradient; per plan this rank's (loss share, gradients, norm, weights, bytes of
    stored activations). `exchange`: how keys and values of shared documents travel. `staged_on`: all ranks are on this
    device, and what they send goes through host memory."""
    decoded = [decode_plan(data) for data in plans]
    if staged_on is not None:
        register_staged()
    mesh = create_meshes(
        [decoded[0].layout],
        torch.device(staged_on or "cpu"),
        timeout_s=TIMEOUT_S,
        channels=channels,
        backend=staged_on and NAME,
    ).start
    rank = RankUnderTest(mesh, kind, changes, dtype)
    weights = rank.weights()
    results = []
    for plan, batch in zip(decoded, tokens, strict=True):
        loss, gradients, norm, stored = rank.run(plan, batch, exchange)
        results.append((loss, gradients, norm, weights, stored))
    return results


class RankUnderTest:
    """One rank's part of a tiny model, as `Trainer` builds it, without data and optimizer."""

    def __init__(
        self, mesh: Mesh, kind: str, changes: Mapping, dtype: torch.dtype, lora: LoraConfig | None = None
    ) -> None:
        config = tiny_config(kind, **changes)
        build = partial(
            build_stage_model,
            tp_rank=mesh.tp_rank,
            dtype=dtype,
            device=mesh.device,
            weights=None,
            seed=3,
            lora=lora,
            router_aux_loss_coef=balance_factor(config),
        )
        models = build_rank_models(config, mesh.layout, mesh.pp_rank, build)
        self._mesh = mesh
        self.buffers = flatten_units(tuple(models.values()), dp=mesh.data_size)
        backend = select_backend("auto", mesh.device.type, attention_soft_cap(config), dtype=dtype)
        self.stages = {s: PipelineStage(model, backend, mesh.tensor) for s, model in models.items()}
        self._executor = Executor(self.stages, mesh)
        if mesh.device.type == "cpu":
            self._executor._copies = SpoiledHostCopies()

    def run(
        self, plan: StepPlan, batch: dict, exchange: str, *, is_overlapped: bool = True
    ) -> tuple[float, dict, float, StoredBytes]:
        """A plan's step on a fresh gradient: loss share, gradients by name, the gradient's norm, stored bytes.

        Args:
            is_overlapped: gradients are summed beside packs, and weights of other ranks' shards, which are NaN before,
                arrive beside them.
        """
        mesh = self._mesh
        tokens = {doc_id: ids.numpy().astype(np.int32) for doc_id, ids in batch.items()}
        with GradientReduction(self.buffers, mesh, is_overlapped=is_overlapped) as reduction:
            prepared = prepare_step(plan, tokens, mesh, exchange)  # type: ignore[arg-type]
            run = self.run_prepared(prepared, reduction.release, self._arriving_weights() if is_overlapped else None)
            shards = reduction.finish()
        norm, _ = reduction.norm_and_loss(torch.zeros(()))
        gradients = {}
        for buffer, shard in zip(self.buffers, shards, strict=True):
            flat = torch.empty_like(buffer.grads)
            if mesh.data_size > 1:
                all_gather_single(flat, shard, group=mesh.data)
            else:
                flat.copy_(shard)
            start = 0
            for name, parameter in zip(buffer.names, buffer.parameters, strict=True):
                own, split = flat[start : start + parameter.numel()].view(parameter.shape), tensor_split(parameter)
                gradients[name] = join_parts(own, split, mesh.tensor).cpu().numpy().copy()
                start += parameter.numel()
        by_kind = dict(zip(STORE_KINDS, run.trace.memory_kind_bytes.T.tolist(), strict=True))
        after = run.trace.memory_bytes.tolist()
        stored = StoredBytes(
            *(run.held.peak_bytes, run.held.peak_by_kind, after, by_kind),
            *(run.held.peak_host_bytes, run.most_sends_kept, run.context_bytes),
        )
        return run.loss, gradients, norm, stored

    def losses(self, plan: StepPlan, batch: dict, exchange: str) -> np.ndarray:
        """This rank's share of the label losses of every document, by the plan's forwards alone; float64[n]."""
        tokens = {doc_id: ids.numpy().astype(np.int32) for doc_id, ids in batch.items()}
        step = prepare_step(forward_only(plan), tokens, self._mesh, exchange)  # type: ignore[arg-type]
        return forward_losses(step, self.stages, self._mesh).numpy()

    def run_prepared(
        self, step: RankStep, on_final: OnFinal = lambda unit: None, weights: WeightGathers | None = None
    ) -> RankRun:
        """A prepared step on a fresh gradient."""
        for buffer in self.buffers:
            buffer.grads.zero_()
        return self._executor.run(step, on_final=on_final, weights=weights)

    def _arriving_weights(self) -> WeightGathers:
        """Of what this rank does not own nothing is there yet."""
        mesh, gathers = self._mesh, WeightGathers(self._mesh, is_overlapped=True)
        for buffer in self.buffers:
            own = buffer.shard(buffer.values, mesh.data_rank, mesh.data_size)
            kept = own.clone()
            buffer.values.fill_(float("nan"))
            own.copy_(kept)
        for buffer in sorted(self.buffers, key=lambda buffer: buffer.unit):
            gathers.put(buffer)
        gathers.seal()
        return gathers

    def weights(self) -> dict:
        """Trained weights by name."""
        found = {}
        for buffer in self.buffers:
            for name, parameter in zip(buffer.names, buffer.parameters, strict=True):
                value = join_parts(parameter.detach(), tensor_split(parameter), self._mesh.tensor)
                # numpy knows no bfloat16.
                found[name] = (value.float() if value.dtype == torch.bfloat16 else value).cpu().numpy().copy()
        return found
