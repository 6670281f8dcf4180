"""Functions that run on every rank of a `GlooPool`."""

import tempfile
from collections.abc import Mapping
from contextlib import closing
from typing import Literal, NamedTuple

import msgspec
import numpy as np
import torch

import interpreted_liger
from dist_training import COSTS
from evenload.check.smaller_run import gathered_gradients
from evenload.config.sections import LoraConfig, OptimizerConfig, RunConfig
from evenload.config.train_config import ModelConfig
from evenload.data.blocks import TokenTable
from evenload.data.hub import model_from_config
from evenload.runtime.comm.mesh import ChannelMode, Meshes, create_meshes
from evenload.runtime.executor import Executor, RankRun, forward_losses
from evenload.runtime.model.tensor_weights import join_parts, tensor_split
from evenload.runtime.optim.data_parallel import GradientReduction, WeightGathers
from evenload.runtime.replay.held_bytes import STORE_KINDS
from evenload.runtime.replay.rank_packs import RankStep
from evenload.runtime.replay.stage import OnFinal
from evenload.runtime.stages.rank_state import RankState
from evenload.runtime.step_source import prepare_step
from evenload.stepplan.plan_file import forward_only
from evenload.types.layout import ParallelLayout
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
    before: ParallelLayout | None = None,
    kernels: Literal["auto", "liger"] = "auto",
) -> list:
    """Run each plan's step on a fresh gradient; per plan this rank's (loss share, gradients, norm, weights, bytes of
    stored activations). `exchange`: how keys and values of shared documents travel. `staged_on`: all ranks are on this
    device, and what they send goes through host memory. `before`: the layout from which the run changes to theirs.
    `kernels`: as `train.kernels`, "liger" also on a CPU, in Triton's interpreter."""
    decoded = [decode_plan(data) for data in plans]
    if kernels == "liger":
        interpreted_liger.prepare()
    if staged_on is not None:
        register_staged()
    layout = decoded[0].layout
    meshes = create_meshes(
        [layout] if before is None else [before, layout],
        torch.device(staged_on or "cpu"),
        timeout_s=TIMEOUT_S,
        channels=channels,
        backend=staged_on and NAME,
    )
    rank = RankUnderTest(meshes, layout, kind, changes, dtype, kernels=kernels)
    weights = rank.weights()
    results = []
    for plan, batch in zip(decoded, tokens, strict=True):
        loss, gradients, norm, stored = rank.run(plan, batch, exchange)
        results.append((loss, gradients, norm, weights, stored))
    return results


def _as_tokens(batch: Mapping) -> Mapping:
    if isinstance(batch, TokenTable):
        return batch
    return {doc_id: ids.numpy().astype(np.int32) for doc_id, ids in batch.items()}


class RankUnderTest:
    """One rank's part of a tiny model in a layout, to which the run has changed where its meshes start in another."""

    def __init__(
        self,
        meshes: Meshes,
        layout: ParallelLayout,
        kind: str,
        changes: Mapping,
        dtype: torch.dtype,
        lora: LoraConfig | None = None,
        kernels: Literal["auto", "liger"] = "auto",
    ) -> None:
        config, self._mesh = tiny_config(kind, **changes), meshes.of(layout)
        with tempfile.TemporaryDirectory() as directory:
            config.save_pretrained(directory)
            model = ModelConfig(
                path=directory,
                random_init=True,
                dtype=str(dtype).removeprefix("torch."),
                lora=lora,
                router_aux_loss_coef=balance_factor(config),
            )
            spec = model_from_config(config.to_dict(), config.model_type, dtype.itemsize)
            run = RunConfig(output_dir=directory, seed=3, kernels=kernels)
            state = RankState(model, OptimizerConfig(), run, spec, meshes)
        if self._mesh is not meshes.start:
            state.change_layout(msgspec.structs.replace(self._mesh.layout, generation=1), COSTS)
            assert state.settle() is not None
        self.stages, self.buffers = state.stages, state.buffers
        self._executor = Executor(self.stages, self._mesh)
        if self._mesh.device.type == "cpu":
            self._executor._copies = SpoiledHostCopies()

    def run(
        self, plan: StepPlan, batch: Mapping, exchange: str, *, is_overlapped: bool = True
    ) -> tuple[float, dict, float, StoredBytes]:
        """A plan's step on a fresh gradient: loss share, gradients by name, the gradient's norm, stored bytes.

        Args:
            is_overlapped: gradients are summed beside packs, and weights of other ranks' shards, which are NaN before,
                arrive beside them.
        """
        mesh = self._mesh
        tokens = _as_tokens(batch)
        before_bytes = self._context_bytes()
        with closing(GradientReduction(self.buffers, mesh, is_overlapped=is_overlapped)) as reduction:
            prepared = prepare_step(plan, tokens, mesh, exchange)  # type: ignore[arg-type]
            run = self.run_prepared(prepared, reduction.release, self._arriving_weights() if is_overlapped else None)
            shards = reduction.finish()
        norm, _ = reduction.norm_and_loss(torch.zeros(()))
        whole = gathered_gradients(self.buffers, shards, mesh)
        gradients = {name: gradient.cpu().numpy().copy() for name, gradient in whole.items()}
        trace = run.trace()
        by_kind = dict(zip(STORE_KINDS, trace.memory_kind_bytes.T.tolist(), strict=True))
        after = trace.memory_bytes.tolist()
        stored = StoredBytes(
            *(run.held.peak_bytes, run.held.peak_by_kind, after, by_kind),
            *(run.held.peak_host_bytes, run.most_sends_kept, self._context_bytes() - before_bytes),
        )
        return float(run.loss_sum), gradients, norm, stored

    def _context_bytes(self) -> int:
        return sum(group.moved_bytes for group in self._mesh.context.values())

    def losses(self, plan: StepPlan, batch: Mapping, exchange: str) -> np.ndarray:
        """This rank's share of the label losses of every document, by the plan's forwards alone; float64[n]."""
        tokens = _as_tokens(batch)
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
        result = {}
        for buffer in self.buffers:
            for name, parameter in zip(buffer.names, buffer.parameters, strict=True):
                value = join_parts(parameter.detach(), tensor_split(parameter), self._mesh.tensor)
                # numpy knows no bfloat16.
                result[name] = (value.float() if value.dtype == torch.bfloat16 else value).cpu().numpy().copy()
        return result
