"""`StepRunner`: one rank that runs plans through the real executor and shows what each document got.

Seen are, per document and slice, the hidden states before the head (last stage) and the gradients of the layers' input
(first stage): logits and losses are functions of the first row by row, and a label that crosses documents shows in the
second.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from evenload.attention.range_attention import RangeAttention
from evenload.config.train_config import TrainConfig
from evenload.runtime.comm.collectives import all_gather_single
from evenload.runtime.comm.mesh import Mesh
from evenload.runtime.executor import Executor
from evenload.runtime.model.tensor_weights import join_parts, tensor_split
from evenload.runtime.optim.data_parallel import GradientReduction
from evenload.runtime.replay.pack_tokens import PackTokens
from evenload.runtime.replay.rank_packs import Exchange
from evenload.runtime.replay.stage import OnFinal, PipelineStage
from evenload.runtime.replay.store import ActivationStore
from evenload.runtime.replay.weight_products import WeightProducts
from evenload.runtime.stages.rank_stages import build_rank_stages
from evenload.runtime.step_source import prepare_step, replicas_share_packs
from evenload.types.plan import StepPlan

Seen = dict[tuple[str, int, int], Tensor]
"""("output" or "gradient", document, first token of the slice) -> rows [n, hidden] that this rank has."""


@dataclass(frozen=True, eq=False)
class StepOutcome:
    """One step on this rank.

    Args:
        loss: of the whole global batch.
        gradients: summed over replicas, of this rank's parameters by Hugging Face name.
        seen: this rank's rows.
    """

    loss: float
    gradients: dict[str, Tensor]
    seen: Seen


class ObservedStage(PipelineStage):
    """A stage that copies what passes its ends."""

    seen: Seen

    def forward_layers(self, pack: PackTokens, hidden: Tensor, store: ActivationStore) -> Tensor:
        hidden = super().forward_layers(pack, hidden, store)
        if self.model.is_last:
            self._see("output", pack, hidden)
        return hidden

    def backward_layers(
        self,
        pack: PackTokens,
        grad: Tensor,
        store: ActivationStore,
        products: WeightProducts | None = None,
        on_final: OnFinal = lambda unit: None,
    ) -> Tensor:
        grad = super().backward_layers(pack, grad, store, products, on_final)
        if self.model.is_first:
            self._see("gradient", pack, grad)
        return grad

    def _see(self, what: str, pack: PackTokens, rows: Tensor) -> None:
        assert self.num_rows(pack.ranges) == len(rows)
        row = 0
        for own in pack.ranges:
            count = self.num_rows((own,))
            # Of a short slice another rank of a tensor-parallel group may have all rows.
            if count:
                self.seen[what, own.doc_id, own.start] = rows[row : row + count].detach().clone()
            row += count


class StepRunner:
    """Runs steps of a configuration without training, with its attention or another."""

    def __init__(self, config: TrainConfig, mesh: Mesh, backend: RangeAttention | None = None) -> None:
        held = build_rank_stages(config, mesh, ObservedStage, backend)
        self._mesh, self._buffers, self._stages = mesh, held.buffers, held.stages
        self._executor = Executor(self._stages, mesh)
        self._exchange: Exchange = config.parallel.cp_exchange
        self._sums_beside_packs = config.train.overlap_reduction

    def run(self, plan: StepPlan, tokens: Mapping[int, NDArray[np.int32]]) -> StepOutcome:
        """Run a step on zero gradients, with the tokens of every document of it. Collective."""
        mesh = self._mesh
        mesh.watch.step = plan.step
        for buffer in self._buffers:
            buffer.grads.zero_()
        for stage in self._stages.values():
            stage.seen = {}
        # As the configuration says, whether or not it would pay: what is proved is that it changes nothing.
        is_overlapped = self._sums_beside_packs and not replicas_share_packs(plan)
        with GradientReduction(self._buffers, mesh, is_overlapped=is_overlapped) as sums:
            run = self._executor.run(prepare_step(plan, tokens, mesh, self._exchange), on_final=sums.release)
            shards = sums.finish()
        loss = torch.tensor([run.loss], dtype=torch.float64)
        dist.all_reduce(loss, group=mesh.control)
        gradients: dict[str, Tensor] = {}
        for buffer, shard in zip(self._buffers, shards, strict=True):
            flat = torch.empty_like(buffer.grads)
            all_gather_single(flat, shard, group=mesh.data)
            parts = flat[: buffer.num_elements].split([parameter.numel() for parameter in buffer.parameters])
            for name, parameter, own in zip(buffer.names, buffer.parameters, parts, strict=True):
                gradients[name] = join_parts(own.view(parameter.shape), tensor_split(parameter), mesh.tensor)
        seen = {key: rows for stage in self._stages.values() for key, rows in stage.seen.items()}
        return StepOutcome(float(loss), gradients, seen)
