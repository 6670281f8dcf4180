"""`BetweenSteps`: what reads the weights after a step and trains nothing: losses of the validation data, and samples;
which passes over that data were the best so far, whose checkpoints are kept.

All ranks come here together after every step. Results are rank 0's to tell; who waits says for what (`Watch`).
"""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

import torch.distributed as dist

from evenload.config.sections import validation_digest
from evenload.config.train_config import TrainConfig
from evenload.data.config import mixture_configs
from evenload.data.encoding.tokenize import ByteTokenizer, DocumentTokenizer, FileTokenizer, required_opening
from evenload.plan.planner import StepPlanner
from evenload.plan.reconfiguration.flex_planner import FlexPlanner
from evenload.runtime.checkpoint.best_checkpoints import BestPass, saved_passes, with_pass
from evenload.runtime.checkpoint.checkpoint import Progress
from evenload.runtime.checkpoint.directory import checkpoints_of
from evenload.runtime.comm.mesh import Meshes
from evenload.runtime.stages.rank_state import RankState
from evenload.runtime.stages.sampler import Sampler, require_whole_model
from evenload.runtime.stages.validator import Validator
from evenload.types.counted import counted
from evenload.types.model import ModelSpec
from evenload.types.sample import Sample
from evenload.types.validation import Validation


class Looked(NamedTuple):
    """What was found after a step.

    Args:
        validation: None = no pass was due, or it was abandoned.
        is_best: the pass is among the best, so its checkpoint is kept.
        samples: of rank 0; () = none were due.
        stop_signal: that came during the pass, as all ranks agreed; 0 = none.
    """

    validation: Validation | None = None
    is_best: bool = False
    samples: tuple[Sample, ...] = ()
    stop_signal: int = 0


@dataclass(frozen=True, eq=False)
class RunUnderWay:
    """What passes between steps take from the run, the same from its first step to its last.

    Args:
        state: whose weights are read.
        planner: that plans the run's steps.
        is_last: no step of the run comes after those done; asked where that decides.
        asked_to_stop: the signal that this rank got, or 0; all abandon a pass where any got one.
        settle_saves: waits until no checkpoint is being written; collective.
    """

    state: RankState
    planner: StepPlanner | FlexPlanner
    _: KW_ONLY
    is_last: Callable[[], bool]
    asked_to_stop: Callable[[], int]
    settle_saves: Callable[[], None]


class BetweenSteps:
    """Of one run, on one rank. `ConfigError` where the run asks for samples that no process can write.

    Args:
        tokenizer: the run's; None where its documents are numbers already.
    """

    def __init__(
        self, config: TrainConfig, tokenizer: DocumentTokenizer | None, model: ModelSpec, meshes: Meshes
    ) -> None:
        require_whole_model(config, meshes.layouts)
        self._keep_best, self._directory = config.train.keep_best, checkpoints_of(config.train.output_dir)
        self._validator: Validator | None = None
        self._sampler: Sampler | None = None
        self.digest = ""
        """Of the settings that decide losses of the validation data; "" = there are none."""
        if config.validation is not None:
            self.digest = validation_digest(config.data, config.validation)
            self._validator = Validator(config, tokenizer, model.vocab_size, meshes)
        if config.samples is not None:
            assert isinstance(tokenizer, ByteTokenizer | FileTokenizer), "refused above where there is none"
            texts = any(part.record != "messages" for part in mixture_configs(config.data))
            opening = required_opening(tokenizer, config.data.prepend_bos) if texts else ()
            self._sampler = Sampler(config.samples, tokenizer, model.position_rows or None, opening)
        self.best: tuple[BestPass, ...] = ()
        """Passes over the validation data with the smallest losses, best first. Where the last one is among the best
        `train.keep_best`, also the one that it drives out as soon as its checkpoint is there."""
        self.validated_steps = 0
        """Steps done when the validation data was last gone through; 0 = never."""

    def take_over(self, progress: Progress) -> str:
        """Of a checkpoint that is resumed; what people should know of it, or ""."""
        self.validated_steps = progress.validated_steps
        if not progress.best or not self._keep_best:
            return ""
        if progress.validation_digest == self.digest:
            self.best = progress.best
            return ""
        best = progress.best[0]
        return (
            "[validation], or what it takes over from [data], has changed, so losses of earlier passes cannot be "
            f"compared with coming ones and are forgotten: the best was {best.loss:.4f} after "
            f"{counted(best.steps_done, 'step')}. "
            "Checkpoints that were kept for them are removed at the next save like any older one"
        )

    def validates_after(self, steps_done: int) -> bool:
        """Whether weights are read after so many steps, whether or not they are the last."""
        return self._validator is not None and self._validator.is_due(steps_done)

    def look(self, steps_done: int, run: RunUnderWay, *, is_stopping: bool) -> Looked:
        """After a step. Collective.

        Args:
            is_stopping: all ranks have agreed to end; the start that goes on makes the pass.

        Raises:
            DataError, InfeasiblePlanError: as `Validator.run`.
        """
        if is_stopping:
            return Looked()
        samples = self._write_samples(steps_done, run.state)
        return self.make_up(steps_done, run)._replace(samples=samples)

    def make_up(self, steps_done: int, run: RunUnderWay) -> Looked:
        """The pass that is due after so many steps and was not made yet, also by the run that did them: it may have
        been stopped, or have left off. Collective; raises as `look`."""
        if self._validator is None or steps_done in (0, self.validated_steps):
            return Looked()
        if not self._validator.is_due_or_last(steps_done, run.is_last):
            return Looked()
        validation, stop_signal = self._validator.run(steps_done - 1, run.state, run.planner, run.asked_to_stop)
        if validation is None:
            return Looked(stop_signal=stop_signal)
        self.validated_steps = steps_done
        is_best = bool(self._keep_best) and self._note_pass(steps_done, validation.loss, run)
        return Looked(validation, is_best, stop_signal=stop_signal)

    def _note_pass(self, steps_done: int, loss: float | None, run: RunUnderWay) -> bool:
        """Whether the pass is among the best whose checkpoints are there. Collective."""
        run.settle_saves()  # a save may write or remove one of them
        told, mesh = [self.best], run.state.mesh
        if mesh.rank == 0:
            told = [saved_passes(self._directory, self.best, self._keep_best)]
        with mesh.watch.waiting("which of the best checkpoints are there"):
            dist.broadcast_object_list(told, src=0, group=mesh.control)
        self.best, is_best = with_pass(told[0], steps_done, loss, self._keep_best)
        return is_best

    def _write_samples(self, steps_done: int, state: RankState) -> tuple[Sample, ...]:
        """What the model writes, where that is due; rank 0 writes, the others wait."""
        if self._sampler is None or not self._sampler.is_due(steps_done):
            return ()
        mesh, stages = state.mesh, state.stages  # which waits for weights on every rank
        found = self._sampler.run(steps_done - 1, stages[0]) if mesh.rank == 0 else ()
        with mesh.watch.waiting("the samples that rank 0 writes"):
            dist.barrier(group=mesh.control)
        return found
