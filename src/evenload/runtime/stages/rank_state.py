"""`RankState`: what a rank holds of the model and its optimizer in the layout that runs, on which steps are run."""

import math
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from evenload.config.sections import OptimizerConfig, RunConfig
from evenload.config.train_config import ModelConfig
from evenload.cost.coefficients import CostCoefficients
from evenload.errors import InvalidPlanError
from evenload.runtime.comm.mesh import Mesh, Meshes
from evenload.runtime.executor import Executor, RankRun, forward_losses
from evenload.runtime.optim.data_parallel import (
    FlatBuffer,
    GatherTrace,
    GradientReduction,
    UpdatesInBackward,
    WeightsUnderWay,
)
from evenload.runtime.optim.optimizer import OffloadedState, ShardedOptimizer
from evenload.runtime.replay.host_copies import host_copies
from evenload.runtime.replay.rank_packs import RankStep
from evenload.runtime.replay.stage import PipelineStage
from evenload.runtime.stages.live_stages import LiveStages, RankStages, Switch, build_rank_stages, joined_switch
from evenload.stepplan.validate import why_not_in_backward
from evenload.types.layout import ParallelLayout
from evenload.types.model import ModelSpec


@dataclass(frozen=True, eq=False, kw_only=True)
class StepGradients:
    """Holds one rank's gradients of a step before its update, zeros where it was made in backward; norm and loss are of
    the whole step. `sums` are starts and ends of its reduce-scatters, [2, n]."""

    run: RankRun
    shards: list[Tensor]
    grad_norm: float
    loss: float
    sums: NDArray[np.float64]
    gathers: list[GatherTrace]

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


class RankState:
    """One rank's part. `ConfigError`, `UnsupportedModelError`: model or options cannot be trained like this."""

    def __init__(
        self,
        model: ModelConfig,
        optimizer: OptimizerConfig,
        run: RunConfig,
        spec: ModelSpec,
        meshes: Meshes,
        twin_bytes: int | None = None,
    ) -> None:
        self._settings, self._meshes = optimizer, meshes
        self.updates_in_backward = in_turn = optimizer.in_backward
        """`gradients` updates weights, too."""
        self.mesh: Mesh = meshes.start
        self.live = LiveStages(model, run, spec, meshes, twin_bytes) if len(meshes.layouts) > 1 else None
        self.held: RankStages = (
            self.live.held if self.live else build_rank_stages(model, run, spec, self.mesh, unit_gradients=in_turn)
        )
        self.executor = Executor(self.held.stages, self.mesh)
        state = None if self.live is None else self.live.initial_state()
        device, offloads = self.mesh.device, self.mesh.pipeline_stage in optimizer.offload_stages
        self.optimizer = ShardedOptimizer(
            self.held.buffers,
            self.mesh,
            optimizer,
            state,
            average_decay=run.ema_decay,
            host=OffloadedState(host_copies(device), host_copies(device), device) if offloads else None,
        )
        self.layout = self.mesh.layout
        """Layout that runs now; its generation is that of the last plan."""

    @property
    def stages(self) -> Mapping[int, PipelineStage]:
        """Virtual stages by index, with whole weights; none where the rank is idle."""
        self.weights_under_way.finish()
        return self.held.stages

    @property
    def buffers(self) -> list[FlatBuffer]:
        """Trained parameters, whole, and their gradients."""
        self.weights_under_way.finish()
        return self.held.buffers

    @property
    def weights_under_way(self) -> WeightsUnderWay:
        """What brings weights that this rank may still lack: of a change of the layout, or of the last update."""
        arrival = None if self.live is None else self.live.arrival
        return arrival or self.optimizer.gathers

    def static_bytes(self) -> int:
        return self.optimizer.static_bytes() + self.held.frozen_bytes

    def gradients(self, step: RankStep | None, rate: float = 0.0, *, is_overlapped: bool = False) -> StepGradients:
        """Run this rank's part of a step, None where it is idle, and sum gradients; with `optimizer.in_backward` update
        weights at this learning rate, too. `InvalidPlanError`: its plan does not allow that. Collective."""
        buffers, mesh, gathers = self.held.buffers, self.mesh, self.weights_under_way
        for buffer in buffers:
            buffer.grads.zero_()
        if not self.updates_in_backward:
            reduction = GradientReduction(buffers, mesh, is_overlapped=is_overlapped)
        else:
            if step is not None and (why := why_not_in_backward(step.plan)):
                raise InvalidPlanError(f"step {step.plan.step}: {why}")
            self.optimizer.begin_step()
            reduction = UpdatesInBackward(buffers, mesh, partial(self.optimizer.update_unit, rate=rate))
        with closing(reduction) as sums:
            run = self.executor.idle() if step is None else self.executor.run(step, sums.release, gathers)
            gathers.finish()  # in a layout in which the rank is idle, too
            with mesh.watch.waiting("the sum of gradients", self._replicas):
                shards = sums.finish()
        with mesh.watch.waiting("the gradient norm"):
            grad_norm, loss = sums.norm_and_loss(run.loss_sum)
        return StepGradients(
            run=run, shards=shards, grad_norm=grad_norm, loss=loss, sums=sums.trace(), gathers=gathers.take_traces(mesh)
        )

    def losses(self, step: RankStep | None, num_documents: int) -> Tensor:
        """Sum label losses by document, float64[n], the same on every rank; no step where idle. Collective."""
        self.weights_under_way.finish()
        sums = torch.zeros(num_documents, dtype=torch.float64)
        if step is not None:
            sums = forward_losses(step, self.held.stages, self.mesh, self.executor.receives)
        with self.mesh.watch.waiting("the losses of documents"):
            dist.all_reduce(sums, group=self.mesh.control)
        return sums

    def update(self, gradients: StepGradients, rate: float, *, is_overlapped: bool = False) -> list[GatherTrace]:
        """Update all weights, where no backward did; return the all-gathers that are done, none where `is_overlapped`.
        Collective."""
        if self.updates_in_backward:
            return self.optimizer.gathers.take_traces(self.mesh)
        with self.mesh.watch.waiting("the updated weights", self._replicas):
            self.optimizer.step(gradients.shards, gradients.grad_norm, rate, is_overlapped=is_overlapped)
        return [] if is_overlapped else self.optimizer.gathers.take_traces(self.mesh)

    @property
    def _replicas(self) -> str:
        return f"the ranks that hold stage {self.mesh.pipeline_stage}"

    def change_layout(self, layout: ParallelLayout, coefficients: CostCoefficients, forward_s: float = 0.0) -> None:
        """Go on in another layout or generation; what a switch costs is predicted by these coefficients, and by how
        long the coming step's first forward takes. `InvalidPlanError`: another layout in one generation. Collective."""
        from_s, mesh = time.perf_counter(), self._meshes.of(layout)
        if mesh is not self.mesh:
            if layout.generation == self.layout.generation:
                raise InvalidPlanError(
                    f"a plan is made for {layout.describe()}, but {self.layout.describe()} runs in the same generation "
                    f"({layout.generation}); a change of the layout has to begin another"
                )
            assert self.live is not None, "there are meshes of several layouts"
            mesh.watch.name = mesh.place
            self.live.move_to(mesh, self.optimizer, coefficients, from_s, forward_s)
            self.mesh, self.held = mesh, self.live.held
            self.executor.move_to(self.held.stages, mesh)
        self.layout = layout

    def settle(self) -> Switch | None:
        """Take the layout's optimizer before a step's update; return what a switch took, on all ranks. Collective."""
        settled = None if self.live is None else self.live.settle(self._settings)
        if settled is None:
            return None
        self.optimizer, switch = settled
        return joined_switch(switch, self.mesh)
