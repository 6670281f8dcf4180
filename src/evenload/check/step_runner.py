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

from evenload.attention.range_attention import RangeAttention, select_backend
from evenload.cost.coefficients import CostCoefficients
from evenload.cost.pack_cost import PackCosts
from evenload.plan.sharding_cost import sharding_cost
from evenload.runtime.config import TrainConfig
from evenload.runtime.data_parallel import reduce_gradients
from evenload.runtime.executor import Executor
from evenload.runtime.hf_model import StageModel, load_config
from evenload.runtime.mesh import Mesh
from evenload.runtime.parameter_units import flatten_units
from evenload.runtime.rank_model import build_rank_models
from evenload.runtime.recipes import attention_soft_cap
from evenload.runtime.stage import PackTokens, PipelineStage
from evenload.runtime.store import ActivationStore
from evenload.runtime.tensor_group import TensorGroup
from evenload.runtime.tensor_weights import join_parts, tensor_split
from evenload.runtime.trainer import model_spec
from evenload.runtime.weight_products import WeightProducts
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

    def __init__(self, model: StageModel, backend: RangeAttention, tensor: TensorGroup | None) -> None:
        super().__init__(model, backend, tensor)
        self.seen: Seen = {}

    def forward_layers(self, pack: PackTokens, hidden: Tensor, store: ActivationStore) -> Tensor:
        """As the stage's."""
        hidden = super().forward_layers(pack, hidden, store)
        if self.model.is_last:
            self._see("output", pack, hidden)
        return hidden

    def backward_layers(
        self, pack: PackTokens, grad: Tensor, store: ActivationStore, products: WeightProducts | None = None
    ) -> Tensor:
        """As the stage's."""
        grad = super().backward_layers(pack, grad, store, products)
        if self.model.is_first:
            self._see("gradient", pack, grad)
        return grad

    def _see(self, what: str, pack: PackTokens, rows: Tensor) -> None:
        assert self.num_rows(pack.ranges) == len(rows)
        row = 0
        for doc_id, start, stop in pack.ranges:
            count = self.num_rows(((doc_id, start, stop),))
            # Of a short slice another rank of a tensor-parallel group may have all rows.
            if count:
                self.seen[what, doc_id, start] = rows[row : row + count].detach().clone()
            row += count


class StepRunner:
    """Runs steps of a configuration without training.

    Args:
        coefficients: decide shardings that are left to predicted seconds.
        backend: of attention; default: the configured one.
    """

    def __init__(
        self, config: TrainConfig, mesh: Mesh, coefficients: CostCoefficients, backend: RangeAttention | None = None
    ) -> None:
        hf = load_config(config.model.path)
        models = build_rank_models(
            hf,
            layout=mesh.layout,
            pp_rank=mesh.pp_rank,
            dtype=getattr(torch, config.model.dtype),
            device=mesh.device,
            weights=None if config.model.random_init else config.model.path,
            seed=config.train.seed,
            lora=config.model.lora,
            tp_rank=mesh.tp_rank,
        )
        self._mesh = mesh
        self._buffers = flatten_units(tuple(models.values()), mesh.data_size)
        backend = backend or select_backend(
            config.train.attention,
            mesh.device.type,
            attention_soft_cap(hf),
            dtype=getattr(torch, config.model.dtype),
            head_dim=model_spec(config).head_dim,
        )
        self._stages = {stage: ObservedStage(model, backend, mesh.tensor) for stage, model in models.items()}
        costs = PackCosts(model_spec(config), coefficients, mesh.layout)
        self._executor = Executor(
            self._stages,
            mesh,
            exchange=config.parallel.cp_exchange,
            sharding_cost=sharding_cost(costs, dp_merge=config.plan.options.dp_merge),
        )

    def run(self, plan: StepPlan, tokens: Mapping[int, NDArray[np.int32]]) -> StepOutcome:
        """Run a step on zero gradients. Collective.

        Args:
            tokens: of every document of the step.
        """
        mesh = self._mesh
        mesh.watch.step = plan.step
        for buffer in self._buffers:
            buffer.grads.zero_()
        for stage in self._stages.values():
            stage.seen = {}
        run = self._executor.run(plan, self._executor.prepare(plan, tokens))
        shards = reduce_gradients(self._buffers, mesh)
        loss = torch.tensor([run.loss], dtype=torch.float64)
        dist.all_reduce(loss, group=mesh.control)
        gradients: dict[str, Tensor] = {}
        for buffer, shard in zip(self._buffers, shards, strict=True):
            flat = torch.empty_like(buffer.grads)
            if mesh.data_size > 1:
                dist.all_gather_single(flat, shard, group=mesh.data)
            else:
                flat.copy_(shard)
            start = 0
            for name, parameter in zip(buffer.names, buffer.parameters, strict=True):
                own = flat[start : start + parameter.numel()].view(parameter.shape)
                gradients[name] = join_parts(own, tensor_split(parameter), mesh.tensor)
                start += parameter.numel()
        seen = {key: rows for stage in self._stages.values() for key, rows in stage.seen.items()}
        return StepOutcome(float(loss), gradients, seen)
