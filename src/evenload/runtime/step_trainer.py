"""`StepTrainer` trains one step on one rank, from the barrier at its start to the exchange of measurements at its end.

Whether a step is finite is decided from sums over all ranks, so all decide alike, before the optimizer changes
anything (but for `optimizer.in_backward`). Price: 4 bytes a row of a last stage until the step ends.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import torch
import torch.distributed as dist

from evenload.config.sections import RunConfig
from evenload.cost.coefficients import CostCoefficients
from evenload.data.batches import LoaderState
from evenload.data.ledger import Tally, account_skipped, count_without_loss, tally_of, warn_without_loss
from evenload.errors import NonFiniteStepError
from evenload.feed.step_maker import PlannedStep
from evenload.runtime.checkpoint.writer import Saves
from evenload.runtime.comm.mesh import Mesh, gather_from_all
from evenload.runtime.device import measured_peak_bytes, reset_peak_bytes, seconds_now
from evenload.runtime.executor import HeadOutput
from evenload.runtime.replay.context_attention import rows_of
from evenload.runtime.replay.store import num_rows
from evenload.runtime.stages.rank_state import RankState, StepGradients
from evenload.runtime.step_metrics import (
    RankStepReport,
    StepReport,
    device_peaks,
    gather_timeline,
    no_label_warning,
    step_row,
)
from evenload.runtime.step_source import PreparedStep
from evenload.types.model import ModelSpec
from evenload.types.plan import StepPlan
from evenload.types.timeline import Timeline

MAX_SKIPPED_IN_A_ROW = 10
"""After more steps without an update the weights themselves must be broken."""

DROPPED_REASON = "not finite"

_MAX_NAMED = 4


class NonFiniteSteps:
    """Stops a run at a step whose loss or gradient is not finite, or leaves the step out and counts it."""

    def __init__(self, on_nonfinite: Literal["stop", "skip"], *, in_backward: bool = False) -> None:
        self.num_skipped = 0
        """Steps without an update since the run began."""
        self.num_in_a_row = 0
        """Of them, up to the last step."""
        self._may_skip, self._in_backward = on_nonfinite == "skip", in_backward
        self._skipped, self._masked, self._untaught = Tally(), 0, 0  # since the loader's account was loaded

    def skip_or_stop(
        self, planned: PlannedStep, gradients: StepGradients, mesh: Mesh, newest: Callable[[], Path | None]
    ) -> str:
        """Count a step's documents as dropped and return a warning, or raise `NonFiniteStepError`, on every rank.
        `newest` returns the newest checkpoint. Collective."""
        text, documents = _describe(planned, gradients, mesh), planned.plan.documents
        self.num_in_a_row += 1
        if self._may_skip and self.num_in_a_row < MAX_SKIPPED_IN_A_ROW:
            masked, untaught = count_without_loss(documents)
            self._skipped += tally_of(documents)
            self._masked, self._untaught = self._masked + masked, self._untaught + untaught
            self.num_skipped += 1
            return f"{text}. The update was not applied; its documents count as dropped ({DROPPED_REASON})"
        last = newest()
        advice = (
            "Lower optimizer.learning_rate or lengthen optimizer.warmup_steps, take the document out of the data, or "
            f"leave such steps out with train.on_nonfinite=skip{' (without in_backward)' * self._in_backward}"
        )
        if self._may_skip:
            advice = (
                f"{MAX_SKIPPED_IN_A_ROW} steps in a row were so (train.on_nonfinite = 'skip'): lower "
                "optimizer.learning_rate, or go back to an earlier checkpoint"
            )
        applied = "The update was not applied and"
        if self._in_backward:
            applied = "Weights were updated by it (optimizer.in_backward), but"
        raise NonFiniteStepError(
            f"{text}. {applied} nothing was saved; "
            f"{f'the last checkpoint, {last}, is from before' if last else 'there is no checkpoint yet'}. {advice}"
        )

    def account(self, state: LoaderState) -> LoaderState:
        """Return the loader's state with these steps as dropped; it ran ahead and has counted them as trained."""
        if not self._skipped.documents:
            return state
        ledger = account_skipped(state.ledger, DROPPED_REASON, self._skipped, self._masked, self._untaught)
        return msgspec.structs.replace(state, ledger=ledger)

    def ledger_lines(self, planned: PlannedStep) -> tuple[str, ...]:
        if not self._skipped.documents:
            return planned.ledger_lines
        return tuple(self.account(planned.loader_state).ledger.lines())


class _Suspect(NamedTuple):
    """Names a pack whose loss or gradient is not finite, and its documents with such rows."""

    replica: int
    pack: int
    doc_ids: tuple[int, ...]


def _describe(planned: PlannedStep, gradients: StepGradients, mesh: Mesh) -> str:
    """Describe what is not finite and where it comes from, alike on every rank. Collective over the control group."""
    heads = gradients.run.heads
    mine = ([one for output in heads if (one := _suspect(output, mesh.dp_rank)) is not None], len(heads))
    everyone = gather_from_all(mine, mesh, "which packs are not finite")
    suspects = sorted({suspect for result, _ in everyone for suspect in result})
    num_packs = sum(count for _, count in everyone)
    plan, loss, norm = planned.plan, gradients.loss, gradients.grad_norm
    text = f"step {plan.step}: the loss is {loss:g} and the gradient norm {norm:g}"
    if not suspects:
        return f"{text}; the loss of every pack is finite, so a number became too large on the way back"
    if num_packs > 1 and sum(len(result) for result, _ in everyone) == num_packs:
        text += ", in every pack, so the weights are more likely the cause than a document"
    named = [_describe_pack(suspect, plan, planned.origin) for suspect in suspects[:_MAX_NAMED]]
    more = f", and {len(suspects) - _MAX_NAMED} packs more" if len(suspects) > _MAX_NAMED else ""
    return f"{text}. It comes from {'; '.join(named)}{more}"


def _suspect(output: HeadOutput, replica: int) -> _Suspect | None:
    is_bad = ~torch.isfinite(output.row_sums)
    if bool(torch.isfinite(output.loss)) and not bool(is_bad.any()):
        return None
    documents = {r.doc_id for r in output.ranges}
    if num_rows(output.ranges) == len(is_bad):  # else a tensor-parallel rank has other rows than the pack
        documents = {r.doc_id for rows, r in rows_of(output.ranges) if bool(is_bad[rows].any())} or documents
    return _Suspect(replica, output.pack, tuple(sorted(documents)))


def _describe_pack(suspect: _Suspect, plan: StepPlan, origin: Callable[[int], str]) -> str:
    lengths = {document.doc_id: document.num_tokens for document in plan.documents}
    chosen = suspect.doc_ids[:_MAX_NAMED]
    documents = [f"document {doc_id} ({lengths[doc_id]:,} tokens, {origin(doc_id)})" for doc_id in chosen]
    more = f" and {len(suspect.doc_ids) - _MAX_NAMED} more" if len(suspect.doc_ids) > _MAX_NAMED else ""
    return f"backward pack {suspect.pack} of replica {suspect.replica} with {', '.join(documents)}{more}"


class TrainedStep(NamedTuple):
    """Holds the result of a step: rank 0's report, None elsewhere, and what ranks report together."""

    report: StepReport | None
    agreed: RankStepReport
    is_skipped: bool


class StepTrainer:
    """Trains steps on one rank of a run."""

    def __init__(self, run: RunConfig, model: ModelSpec, state: RankState, saves: Saves) -> None:
        self.settings = run
        self.non_finite = NonFiniteSteps(run.on_nonfinite, in_backward=state.updates_in_backward)
        self._model, self._state, self._saves = model, state, saves

    def run(
        self,
        prepared: PreparedStep,
        coefficients: CostCoefficients,
        *,
        learning_rate: float,
        data_wait_s: float = 0.0,
        stop_signal: int = 0,
        goes_on: bool = False,
    ) -> TrainedStep:
        """Train one step. Collective. Raises as `Trainer.train`.

        Args:
            learning_rate: 0 leaves the weights as they are (the optimizer's moments change).
            data_wait_s: that this rank waited for the step.
            stop_signal: of this rank; all ranks learn of it.
            goes_on: another step follows, so updated weights may still be gathered on return.
        """
        planned, plan = prepared.planned, prepared.planned.plan
        state, mesh = self._state, self._state.mesh
        mesh.watch.step = plan.step
        came_s = time.perf_counter()
        with mesh.watch.waiting("the barrier at the start"):
            dist.barrier(group=mesh.control)
        zero_s = seconds_now(mesh.device)
        reset_peak_bytes(mesh.device)
        if plan.layout != state.layout:
            state.change_layout(plan.layout, coefficients, plan.first_forward_s)
            mesh = state.mesh
        can_sum = coefficients.reduction_overlap is not None
        can_gather = coefficients.gather_overlap is not None and goes_on
        overlaps = can_sum and self.settings.overlap_reduction
        gradients = state.gradients(prepared.step, learning_rate, is_overlapped=overlaps)
        switch, warning = state.settle(), ""
        if gradients.is_finite:
            self.non_finite.num_in_a_row = 0
            ended = state.update(gradients, learning_rate, is_overlapped=can_gather and self.settings.overlap_gather)
            gradients = replace(gradients, gathers=[*gradients.gathers, *ended])
        else:
            warning = self.non_finite.skip_or_stop(planned, gradients, mesh, self._saves.newest)
        if not plan.num_label_tokens:
            warning = no_label_warning(plan)
        elif plan.step == 0 and not warning:
            warning = warn_without_loss(plan.documents, planned.origin)
        end, measured = self._exchange(gradients, came_s, zero_s, data_wait_s, stop_signal)
        if measured is None:
            return TrainedStep(None, end, not gradients.is_finite)
        row = step_row(
            plan,
            measured,
            self._model,
            loss=gradients.loss,
            grad_norm=gradients.grad_norm,
            learning_rate=learning_rate,
            peaks=device_peaks(coefficients, self._model, mesh.num_ranks),
            end=end,
            exchange_s=end.barrier_s + max(0.0, time.perf_counter() - zero_s - measured.step_time_s),
            plan_s=planned.plan_time_s,
        )
        lines = self.non_finite.ledger_lines(planned)
        report = StepReport(row=row, plan=plan, measured=measured, ledger_lines=lines, warning=warning, switch=switch)
        return TrainedStep(report, end, not gradients.is_finite)

    def _exchange(
        self, gradients: StepGradients, came_s: float, zero_s: float, data_wait_s: float, stop_signal: int
    ) -> tuple[RankStepReport, Timeline | None]:
        """Return what all ranks report of a step together, and its timeline on rank 0. Collective."""
        mesh, static_bytes = self._state.mesh, self._state.static_bytes()
        own = RankStepReport(
            step_time_s=seconds_now(mesh.device) - zero_s,
            barrier_s=zero_s - came_s,
            # On a CPU the store's own count, without temporary buffers.
            peak_bytes=measured_peak_bytes(mesh.device) or static_bytes + gradients.run.held.peak_bytes,
            data_wait_s=data_wait_s,
            stop_signal=stop_signal,
            # By the clock of rank 0; the others follow it.
            is_time_to_save=mesh.rank == 0 and self._saves.is_time(),
        )
        with mesh.watch.waiting("the loss and the timeline"):
            end = own.joined(mesh)
            measured = gather_timeline(
                gradients.run.trace(),
                gradients.sums,
                gradients.gathers,
                zero_s=zero_s,
                step_time_s=end.step_time_s,
                static_bytes=static_bytes,
                mesh=mesh,
            )
        return end, measured
