"""`BetweenSteps`: what reads the weights after a step and trains nothing: losses of the validation data, and samples;
which passes over that data were the best so far, whose checkpoints are kept.

All ranks come here together after every step. Results are rank 0's to tell; who waits says for what (`Watch`).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch.distributed as dist

from evenload.data.encoding.tokenize import ByteTokenizer, DocumentTokenizer, FileTokenizer
from evenload.plan.planner import StepPlanner
from evenload.plan.reconfiguration.flex_planner import FlexPlanner
from evenload.runtime.checkpoint.best_checkpoints import BestPass, with_pass
from evenload.runtime.comm.mesh import Meshes
from evenload.runtime.config.train_config import TrainConfig
from evenload.runtime.stages.rank_state import RankState
from evenload.runtime.stages.sampler import Sampler, require_whole_model
from evenload.runtime.stages.validator import Validator
from evenload.types.model import ModelSpec
from evenload.types.sample import Sample
from evenload.types.validation import Validation


class Looked(NamedTuple):
    """What was found after a step.

    Args:
        validation: None = no pass was due.
        is_best: the pass is among the best, so its checkpoint is kept.
        samples: of rank 0; () = none were due.
    """

    validation: Validation | None = None
    is_best: bool = False
    samples: tuple[Sample, ...] = ()


class BetweenSteps:
    """Of one run, on one rank. `ConfigError` where the run asks for samples that no process can write.

    Args:
        tokenizer: the run's; None where its documents are numbers already.
    """

    def __init__(
        self, config: TrainConfig, tokenizer: DocumentTokenizer | None, model: ModelSpec, meshes: Meshes
    ) -> None:
        require_whole_model(config, meshes.layouts)
        self._keep_best = config.train.keep_best
        self._validator: Validator | None = None
        self._sampler: Sampler | None = None
        if config.validation is not None:
            self._validator = Validator(config, tokenizer, model.vocab_size, meshes)
        if config.samples is not None:
            assert isinstance(tokenizer, ByteTokenizer | FileTokenizer), "refused above where there is none"
            self._sampler = Sampler(config.samples, tokenizer, model.position_rows or None)
        self.best: tuple[BestPass, ...] = ()
        """Passes over the validation data with the smallest losses, best first; as many as `train.keep_best`."""

    def take_over(self, best: tuple[BestPass, ...]) -> None:
        """Of a checkpoint that is resumed."""
        self.best = best[: self._keep_best]

    def validates_after(self, steps_done: int) -> bool:
        """Whether weights are read after so many steps, whether or not they are the last."""
        return self._validator is not None and self._validator.is_due(steps_done)

    def look(
        self,
        steps_done: int,
        state: RankState,
        planner: StepPlanner | FlexPlanner,
        *,
        is_last: Callable[[], bool],
        is_stopping: bool,
        is_paused: bool,
    ) -> Looked:
        """After a step. Collective.

        Args:
            planner: that plans the run's steps.
            is_last: no step of the run comes after those done; asked where that decides.
            is_stopping, is_paused: all ranks have agreed to end, and the run goes on later.

        Raises:
            DataError, InfeasiblePlanError: as `Validator.run`.
        """
        samples = () if is_stopping else self._write_samples(steps_done, state)
        if self._validator is None or is_stopping or is_paused:
            return Looked(samples=samples)
        validation = self._validator.after_step(steps_done, is_last, state, planner)
        if validation is None:
            return Looked(samples=samples)
        self.best = with_pass(self.best, steps_done, validation.loss, self._keep_best)
        return Looked(validation, any(one.steps_done == steps_done for one in self.best), samples)

    def _write_samples(self, steps_done: int, state: RankState) -> tuple[Sample, ...]:
        """What the model writes, where that is due; rank 0 writes, the others wait."""
        if self._sampler is None or not self._sampler.is_due(steps_done):
            return ()
        mesh, stages = state.mesh, state.stages  # which waits for weights on every rank
        found = self._sampler.run(steps_done - 1, stages[0]) if mesh.rank == 0 else ()
        with mesh.watch.waiting("the samples that rank 0 writes"):
            dist.barrier(group=mesh.control)
        return found
