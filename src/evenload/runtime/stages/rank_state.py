"""`RankState`: what a rank holds of the model in the layout that runs, and what trains it; it changes between steps.

A run of one layout holds the same from start to end. Where there are several, `LiveStages` moves weights and optimizer
state, and everything that refers to them is exchanged here, at once.
"""

import functools
import time
from collections.abc import Callable, Mapping

from evenload.cost.coefficients import CostCoefficients
from evenload.errors import InvalidPlanError
from evenload.runtime.comm.mesh import Mesh, Meshes
from evenload.runtime.config.train_config import TrainConfig
from evenload.runtime.executor import Executor
from evenload.runtime.optim.optimizer import ShardedAdamW
from evenload.runtime.optim.parameter_units import FlatBuffer
from evenload.runtime.replay.stage import PipelineStage
from evenload.runtime.stages.live_stages import LiveStages, Switch, joined_switch
from evenload.runtime.stages.rank_stages import RankStages, build_rank_stages
from evenload.types.layout import ParallelLayout


class RankState:
    """Of one rank, in the layout in which the run starts.

    Raises:
        ConfigError, UnsupportedModelError: model, weights or options cannot be trained like this.
    """

    def __init__(self, config: TrainConfig, meshes: Meshes) -> None:
        self._config, self._meshes = config, meshes
        self.mesh: Mesh = meshes.start
        self.live = LiveStages(config, meshes) if len(meshes.layouts) > 1 else None
        self.held: RankStages = build_rank_stages(config, self.mesh) if self.live is None else self.live.held
        self.executor = Executor(self.held.stages, self.mesh)
        state = None if self.live is None else self.live.initial_state()
        self.optimizer = ShardedAdamW(self.held.buffers, self.mesh, config.optimizer, state)
        self.layout = self.mesh.layout
        """That runs now; its generation is that of the last plan."""

    @property
    def stages(self) -> Mapping[int, PipelineStage]:
        """Virtual stages by index; none where the rank is idle."""
        return self.held.stages

    @property
    def buffers(self) -> list[FlatBuffer]:
        """Trained parameters and their gradients."""
        return self.held.buffers

    def static_bytes(self) -> int:
        """Weights, gradients and optimizer state."""
        return self.optimizer.static_bytes() + self.held.frozen_bytes

    def looking_ahead(self, coming: Callable[[], ParallelLayout | None], room_bytes: int) -> Callable[[], None]:
        """What to call often in a step: where the next one runs in another layout, it begins what can be done before it
        in so many bytes."""
        return (lambda: None) if self.live is None else functools.partial(self.live.look_ahead, coming, room_bytes)

    def change_layout(self, layout: ParallelLayout, coefficients: CostCoefficients) -> None:
        """Go on in another layout, or in another generation of this one. Collective.

        Raises:
            InvalidPlanError: another layout in the same generation.
        """
        from_s, mesh = time.perf_counter(), self._meshes.of(layout)
        if mesh is not self.mesh:
            if layout.generation == self.layout.generation:
                raise InvalidPlanError(
                    f"a plan is made for {layout.describe()}, but {self.layout.describe()} runs in the same generation "
                    f"({layout.generation}); a change of the layout has to begin another"
                )
            assert self.live is not None, "there are meshes of several layouts"
            mesh.watch.name = mesh.place
            self.live.move_to(mesh, self.optimizer, coefficients, from_s)
            self.mesh, self.held = mesh, self.live.held
            self.executor.move_to(self.held.stages, mesh)
        self.layout = layout

    def settle(self) -> Switch | None:
        """After a step's gradients, before its update: the optimizer of the layout that runs; what a switch before the
        step took, on all ranks, None where there was none. Collective where there was one."""
        found = None if self.live is None else self.live.settle(self._config.optimizer)
        if found is None:
            return None
        self.optimizer, switch = found
        return joined_switch(switch, self.mesh)
