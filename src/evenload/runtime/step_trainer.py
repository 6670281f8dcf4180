"""`StepTrainer`: one step on one rank, from the barrier at its start to what all ranks tell each other at its end.

A prepared step comes in; out come an update of the weights, or none where it is not finite, and a report. Whether ranks
stop, pause or save after it travels with what they tell each other anyway, so all decide alike.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch.distributed as dist

from evenload.config.train_config import TrainConfig
from evenload.cost.coefficients import CostCoefficients
from evenload.data.ledger import untaught_warning
from evenload.runtime.checkpoint.saves import Saves
from evenload.runtime.comm.mesh import Mesh
from evenload.runtime.device import forget_peak_bytes, measured_peak_bytes, peak_process_bytes, seconds_now
from evenload.runtime.optim.data_parallel import overlaps_of
from evenload.runtime.optim.non_finite import NonFiniteSteps
from evenload.runtime.stages.live_stages import Switch
from evenload.runtime.stages.process_memory import ProcessMemory
from evenload.runtime.stages.rank_state import RankState, StepGradients
from evenload.runtime.step_metrics import (
    DevicePeaks,
    RankEnd,
    SecondsAround,
    StepReport,
    gather_timeline,
    no_label_warning,
    step_row,
)
from evenload.runtime.step_source import PreparedStep
from evenload.types.layout import ParallelLayout
from evenload.types.model import ModelSpec
from evenload.types.plan import StepPlan
from evenload.types.timeline import Timeline


class TrainedStep(NamedTuple):
    """What became of a step.

    Args:
        report: on rank 0; None elsewhere.
        agreed: what ranks say of it together; the same on all of them.
        is_skipped: it was not finite, and the weights are as before.
    """

    report: StepReport | None
    agreed: RankEnd
    is_skipped: bool


class StepStart(NamedTuple):
    """A rank's clock at the start of a step: when it came to the barrier, and behind it, which is the step's zero."""

    came_s: float
    zero_s: float


class RankNews(NamedTuple):
    """What a rank brings to a step for all to hear; fields as of `RankEnd`."""

    data_wait_s: float
    stop_signal: int


class StepTrainer:
    """Of one rank of a run.

    Args:
        saves: which follow the state into another layout; a run that gives up names the newest.
    """

    def __init__(self, config: TrainConfig, model: ModelSpec, state: RankState, saves: Saves) -> None:
        self.config = config
        self.memory_cap_bytes = 0
        """Of this process; a switch is prepared in what a step leaves of it."""
        self.non_finite = NonFiniteSteps(config.train.on_nonfinite, state.mesh)
        self._model, self._state, self._saves = model, state, saves
        self._process = ProcessMemory(model, state.mesh.device)

    @property
    def _mesh(self) -> Mesh:
        """Of the layout that runs now."""
        return self._state.mesh

    def run(
        self,
        prepared: PreparedStep,
        coefficients: CostCoefficients,
        *,
        learning_rate: float,
        data_wait_s: float = 0.0,
        stop_signal: int = 0,
        goes_on: bool = False,
        coming_layout: Callable[[], ParallelLayout | None] = lambda: None,
    ) -> TrainedStep:
        """Train one step. Collective.

        Args:
            learning_rate: 0 leaves the weights as they are (the optimizer's moments change).
            data_wait_s: that this rank waited for the step.
            stop_signal: of this rank; all ranks learn of it.
            goes_on: another step follows, so updated weights may still be on their way on return; who reads them
                otherwise takes them from `state`, which waits.
            coming_layout: of the next step, once it is known; asked often.

        Raises:
            NonFiniteStepError, RankLostError: as `Trainer.train`.
        """
        planned, plan = prepared.planned, prepared.planned.plan
        watch = self._mesh.watch
        watch.step = plan.step
        came_s = time.perf_counter()
        with watch.waiting("the barrier at the start"):
            dist.barrier(group=self._mesh.control)
        zero_s = seconds_now(self._mesh.device)
        forget_peak_bytes(self._mesh.device)
        self._process.begin_step(self._state.static_bytes())
        if plan.layout != self._state.layout:
            self._state.change_layout(plan.layout, coefficients)
            self.non_finite.mesh = self._mesh
        mesh, state = self._mesh, self._state
        look_ahead = state.looking_ahead(coming_layout, self._room_bytes(plan))
        look_ahead()
        beside = overlaps_of(self.config, coefficients, shares_packs=prepared.shares_packs, goes_on=goes_on)
        found = state.gradients(prepared.step, look_ahead, is_overlapped=beside.sums)
        switch, warning = self.settle(), ""
        if found.is_finite:
            self.non_finite.note_finite()
            ended = state.update(found, learning_rate, is_overlapped=beside.gathers)
            found = replace(found, gathers=[*found.gathers, *ended])
        else:
            warning = self.non_finite.leave_out(planned, found.run, found.loss, found.grad_norm, self._saves.newest)
        if not plan.num_label_tokens:
            warning = no_label_warning(plan)
        elif plan.step == 0 and not warning:
            warning = untaught_warning(plan.documents, planned.origin)
        own = self._rank_end(found, StepStart(came_s, zero_s), RankNews(data_wait_s, stop_signal))
        end, measured = self._tell(own, found, zero_s)
        if measured is None:
            return TrainedStep(None, end, not found.is_finite)
        row = step_row(
            plan,
            measured,
            self._model,
            loss=found.loss,
            grad_norm=found.grad_norm,
            learning_rate=learning_rate,
            peaks=DevicePeaks.of(coefficients, self._model, mesh.num_ranks),
            around=SecondsAround(
                plan_s=planned.plan_time_s,
                data_wait_s=end.data_wait_s,
                exchange_s=end.barrier_s + max(0.0, time.perf_counter() - zero_s - measured.step_time_s),
            ),
            memory=end.memory(self._process.predicted_bytes(plan, end.fixed_bytes)),
        )
        lines = self.non_finite.ledger_lines(planned)
        report = StepReport(row=row, plan=plan, measured=measured, ledger_lines=lines, warning=warning, switch=switch)
        return TrainedStep(report, end, not found.is_finite)

    def _rank_end(self, found: StepGradients, start: StepStart, news: RankNews) -> RankEnd:
        """What this rank says at the end of a step."""
        device = self._mesh.device
        return RankEnd(
            step_time_s=seconds_now(device) - start.zero_s,
            barrier_s=start.zero_s - start.came_s,
            # On a CPU the store's own count, without temporary buffers.
            peak_bytes=measured_peak_bytes(device) or self._state.static_bytes() + found.run.peak_bytes,
            data_wait_s=news.data_wait_s,
            stop_signal=news.stop_signal,
            # Rank 0 looks at its clock; the others do as it says.
            is_time_to_save=self._mesh.rank == 0 and self._saves.is_time(),
            process_bytes=peak_process_bytes(device) or 0,
            fixed_bytes=self._process.fixed_bytes or 0,
        )

    def _room_bytes(self, plan: StepPlan) -> int:
        """What a step leaves for a switch that is prepared beside it."""
        return self.memory_cap_bytes - plan.predicted.peak_memory_bytes

    def settle(self) -> Switch | None:
        """`RankState.settle`, and checkpoints are of that state from now on."""
        if (switch := self._state.settle()) is not None:
            self._saves.move_to(self._state.buffers, self._state.optimizer, self._mesh)
        return switch

    def _tell(self, own: RankEnd, found: StepGradients, zero_s: float) -> tuple[RankEnd, Timeline | None]:
        """What all ranks say of a step together, and its timeline on rank 0, None elsewhere. Collective.

        Args:
            zero_s: this rank's clock at the step's start.
        """
        with self._mesh.watch.waiting("the loss and the timeline"):
            end = own.joined(self._mesh)
            measured = gather_timeline(
                found.run.trace,
                found.sums,
                found.gathers,
                zero_s=zero_s,
                step_time_s=end.step_time_s,
                static_bytes=self._state.static_bytes(),
                mesh=self._mesh,
            )
        return end, measured
