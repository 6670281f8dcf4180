"""Compute losses of the validation data with the weights after a step. Collective.

    read a batch -> plan it as a step of the layout that runs -> drop its backwards -> run the forwards -> add up losses

Strategy and limit of packs are those of training, without a limit of memory. The loader begins anew every time; ranks
read and plan in the training thread. Price: about a third of training steps of as many tokens, and their reading and
planning, which nothing hides.
"""

import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from evenload.config.sections import ValidationConfig, validation_data, validation_digest
from evenload.data.config import DataConfig
from evenload.data.loader import GlobalBatchLoader
from evenload.data.tokenize import DocumentTokenizer
from evenload.errors import DataError
from evenload.feed.step_maker import PlannedStep, StepMaker
from evenload.planning.planner import RunPlanner, StepPlanner
from evenload.runtime.checkpoint.checkpoint import Progress
from evenload.runtime.checkpoint.directory import BestPass, saved_passes, with_pass
from evenload.runtime.comm.collectives import TorchPeers
from evenload.runtime.comm.mesh import Mesh, Meshes, most_of_ranks, share_of_first
from evenload.runtime.replay.rank_packs import Exchange
from evenload.runtime.stages.rank_state import RankState
from evenload.runtime.step_source import prepare_step, step_maker
from evenload.stepplan.plan_file import forward_only
from evenload.types.layout import ParallelLayout
from evenload.types.run import LossOf, Validation
from evenload.types.text import counted


class Validator:
    """Computes validation losses on one rank. Collective; `DataError` where the data has no readable document."""

    def __init__(
        self,
        settings: ValidationConfig,
        data: DataConfig,
        tokenizer: DocumentTokenizer | None,
        vocab_size: int,
        meshes: Meshes,
        *,
        strategy: str,
        exchange: Exchange,
    ) -> None:
        self.settings, self._strategy, self._exchange = settings, strategy, exchange
        self.digest = validation_digest(data, settings)
        """Digest of the settings that decide losses."""
        own = validation_data(data, settings)
        self._sources = tuple(part.name for part in own.mixture) or (", ".join(own.sources),)
        peers = TorchPeers(meshes.start.control)
        self._loader = GlobalBatchLoader(own, tokenizer, peers=peers, vocab_size=vocab_size)
        self._begin = self._loader.state()
        # Before the first step, where a mistake that a pass would find costs nothing yet.
        try:
            with meshes.start.watch.waiting("the first validation documents"):
                first = self._loader.next_batch()
        except DataError as error:
            raise DataError(f"[validation]: {error}") from error
        finally:
            self._loader.close()
        if first is None:
            raise DataError(
                f"the validation data ({', '.join(self._sources)}) has no document, so there is no loss to compute; "
                "give validation.sources others, raise validation.share, or leave [validation] out"
            )

    def run(
        self, step: int, state: RankState, planner: StepPlanner, stop_requested: Callable[[], int] = lambda: 0
    ) -> tuple[Validation | None, int]:
        """Return the losses after a step, the same on every rank, and the signal that any rank got until then, 0 =
        none, which abandons the pass. Collective.

        Args:
            planner: that plans steps in the layout that runs.
            stop_requested: returns the signal that this rank got, or 0; called before every batch and at the end.

        Raises:
            DataError: a record cannot be read; InfeasiblePlanError: a document does not fit into a pack.
        """
        from_s = time.perf_counter()
        maker = self._maker(planner, state.mesh)
        self._loader.load_state(self._begin)
        with state.optimizer.average_as_weights() if self.settings.of_average else nullcontext():
            try:
                batches, stop_signal = self._batches(maker, state, stop_requested)
                account = self._loader.ledger.state
            finally:
                self._loader.close()
        if batches is None:
            return None, stop_signal
        columns = _BatchLosses(*(np.concatenate(parts) for parts in zip(*batches, strict=True)))
        validation = Validation(
            step=step,
            whole=columns.loss_of("all", np.ones(len(columns.losses), np.bool_)),
            by_length=tuple(columns.by_length()),
            by_source=tuple(columns.loss_of(name, columns.parts == part) for part, name in enumerate(self._sources)),
            seconds=time.perf_counter() - from_s,
            of_average=self.settings.of_average,
            left_out=tuple((reason, one.documents, one.tokens) for reason, one in account.dropped.items()),
        )
        return validation, stop_signal

    def _batches(
        self, maker: StepMaker, state: RankState, stop_requested: Callable[[], int]
    ) -> tuple[list["_BatchLosses"] | None, int]:
        losses: list[_BatchLosses] = []
        while self.settings.batches is None or len(losses) < self.settings.batches:
            if (planned := maker.next()) is None:
                break
            if stop_signal := _agreed(stop_requested(), state.mesh):
                return None, stop_signal
            losses.append(self._losses(planned, state))
        return losses, _agreed(stop_requested(), state.mesh)

    def _maker(self, planner: StepPlanner, mesh: Mesh) -> StepMaker:
        options = msgspec.structs.replace(planner.options, policy="replay")
        assert options.max_pack_tokens is not None, "`make_planner` decides it"
        costs = planner.costs
        planner = StepPlanner(costs.model, costs.coefficients, planner.layout, None, options, host=planner.host)
        run_planner = RunPlanner(planner, self._strategy, may_delay=False, may_cut=False)
        return step_maker(self._loader, run_planner, mesh, options.max_pack_tokens)

    def _losses(self, planned: PlannedStep, state: RankState) -> "_BatchLosses":
        documents, step = planned.plan.documents, None
        if not state.mesh.is_idle:
            step = prepare_step(forward_only(planned.plan), planned.tokens, state.mesh, self._exchange)
        return _BatchLosses(
            np.array([document.num_tokens for document in documents], np.int64),
            np.array([document.num_label_tokens for document in documents], np.int64),
            np.array([planned.part_of(document.doc_id) for document in documents], np.int64),
            state.losses(step, len(documents)).numpy(),
        )


class _BatchLosses(NamedTuple):
    """Documents as columns: tokens, labels and part of the mixture, int64[n] each, and sums of losses, float64[n]."""

    tokens: NDArray[np.int64]
    labels: NDArray[np.int64]
    parts: NDArray[np.int64]
    losses: NDArray[np.float64]

    def loss_of(self, name: str, chosen: NDArray[np.bool_]) -> LossOf:
        labels, total = int(self.labels[chosen].sum()), float(self.losses[chosen].sum())
        return LossOf(
            name=name,
            documents=int(chosen.sum()),
            tokens=int(self.tokens[chosen].sum()),
            label_tokens=labels,
            loss=total / labels if labels and np.isfinite(total) else None,
        )

    def by_length(self) -> Iterable[LossOf]:
        classes = np.frexp(self.tokens)[1] - 1
        for one in np.unique(classes).tolist():
            low, high = 2**one, 2 ** (one + 1) - 1
            yield self.loss_of(f"{low}-{high}" if one else "1", classes == one)


def _agreed(stop_signal: int, mesh: Mesh) -> int:
    with mesh.watch.waiting("whether to stop validating"):
        return int(most_of_ranks(stop_signal, mesh))


class EvaluationResult(NamedTuple):
    """Result of an evaluation after a step; no validation = no pass was due, or it was abandoned."""

    validation: Validation | None = None
    is_best: bool = False
    stop_signal: int = 0


@dataclass(frozen=True, eq=False, kw_only=True)
class EvaluatedRun:
    """Holds what evaluations take from the run.

    Args:
        planner_of: returns what plans steps in a layout.
        is_last: says whether no step of the run comes after those done.
        stop_requested: returns the signal that this rank got, or 0.
        settle_saves: waits until no checkpoint is being written; collective.
    """

    state: RankState
    planner_of: Callable[[ParallelLayout], StepPlanner]
    is_last: Callable[[], bool]
    stop_requested: Callable[[], int]
    settle_saves: Callable[[], None]


class Evaluation:
    """Evaluates the weights of one run; `keep_best` checkpoints with the smallest losses stay in `checkpoints`."""

    def __init__(self, validator: Validator | None, *, keep_best: int, checkpoints: Path) -> None:
        self._validator, self._keep_best, self._directory = validator, keep_best, checkpoints
        self.digest = "" if validator is None else validator.digest
        """Digest of the settings that decide losses of the validation data; "" = there are none."""
        self.best: tuple[BestPass, ...] = ()
        """Passes over the validation data with the smallest losses, as `with_pass` orders them."""

    def resume(self, progress: Progress) -> str:
        """Go on from a resumed checkpoint; return a warning, or ""."""
        if not progress.best or not self._keep_best:
            return ""
        if progress.validation_digest == self.digest:
            self.best = progress.best
            return ""
        best = progress.best[0]
        return (
            "[validation], or what it takes over from [data], has changed, so losses of earlier passes cannot be "
            f"compared with coming ones and are forgotten: the best was {best.loss:.4f} after "
            f"{counted(best.steps_done, 'step')}. Checkpoints for them are removed at the next save like any older one"
        )

    def validates_after(self, steps_done: int) -> bool:
        """Say whether weights are read after so many steps, whether or not they are the last."""
        return self._validator is not None and self._validator.settings.is_due(steps_done)

    def after_step(self, steps_done: int, run: EvaluatedRun) -> EvaluationResult:
        """Make the pass that is due after a step. Collective; raises as `Validator.run`."""
        if (validator := self._validator) is None:
            return EvaluationResult()
        if not (validator.settings.is_due(steps_done) or (validator.settings.at_end and run.is_last())):
            return EvaluationResult()
        planner = run.planner_of(run.state.layout)
        validation, stop_signal = validator.run(steps_done - 1, run.state, planner, run.stop_requested)
        is_best = False
        if validation is not None and self._keep_best:
            is_best = self._record_pass(steps_done, validation.loss, run)
        return EvaluationResult(validation, is_best, stop_signal)

    def _record_pass(self, steps_done: int, loss: float | None, run: EvaluatedRun) -> bool:
        """Record a pass; return whether it is among the best whose checkpoints are there. Collective."""
        run.settle_saves()  # a save may write or remove one of them
        passes, mesh = self.best, run.state.mesh
        if mesh.rank == 0:
            passes = saved_passes(self._directory, self.best, self._keep_best)
        passes = share_of_first(passes, mesh, "which of the best checkpoints are there")
        self.best, is_best = with_pass(passes, steps_done, loss, self._keep_best)
        return is_best
