"""Evaluate the weights after a step: losses of the validation data, and samples. Collective; rank 0 shows results.

**Validation** (`Validator`).

    read a batch -> plan it as a step of the layout that runs -> drop its backwards -> run the forwards -> add up losses

Strategy and limit of packs are those of training, without a limit of memory. The loader begins anew every time; ranks
read and plan in the training thread. Price: about a third of training steps of as many tokens, and their reading and
planning, which nothing hides.

**Samples** (`Sampler`): the prompt is one slice of a document, every new token the next slice; rank 0 writes.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from evenload.config.sections import SamplesConfig, ValidationConfig, validation_data, validation_digest
from evenload.data.config import DataConfig, mixture_configs
from evenload.data.encoders import with_opening
from evenload.data.loader import GlobalBatchLoader
from evenload.data.tokenize import ByteTokenizer, DocumentTokenizer, FileTokenizer, required_opening
from evenload.errors import ConfigError, DataError
from evenload.feed.step_maker import PlannedStep, StepMaker
from evenload.plan.planner import RunPlanner, StepPlanner
from evenload.runtime.checkpoint.checkpoint import Progress
from evenload.runtime.checkpoint.directory import BestPass, saved_passes, with_pass
from evenload.runtime.comm.collectives import TorchPeers
from evenload.runtime.comm.mesh import Mesh, Meshes, most_of_ranks
from evenload.runtime.replay.rank_packs import PackTokens
from evenload.runtime.replay.stage import PipelineStage
from evenload.runtime.replay.store import ForwardStore
from evenload.runtime.stages.rank_state import RankState
from evenload.runtime.step_source import prepare_step, step_maker
from evenload.stepplan.plan_file import forward_only
from evenload.types.document import Range
from evenload.types.layout import ParallelLayout
from evenload.types.run import LossOf, Sample, Validation
from evenload.types.text import counted


def require_whole_model(data: DataConfig, layouts: Sequence[ParallelLayout]) -> None:
    """Raise `ConfigError` where no process can write samples in some layout, or their text is not known."""
    for layout in layouts:
        if layout.num_stages > 1 or layout.tp > 1:
            raise ConfigError(
                f"[samples] is set, but in layout {layout.describe()} no process holds the whole model; samples need "
                "pp, virtual and tp 1. Leave [samples] out, and write from the exported model"
            )
    if data.record == "tokens":
        raise ConfigError("[samples] is set, but data.record is 'tokens': there is no tokeniser for the prompts")


class Sampler:
    """Writes the samples of a run with `[samples]`. `ConfigError`: a prompt has no token, or no position is left."""

    def __init__(
        self, settings: SamplesConfig, data: DataConfig, tokenizer: DocumentTokenizer | None, longest: int | None
    ) -> None:
        assert isinstance(tokenizer, ByteTokenizer | FileTokenizer), "refused at start where there is none"
        self.settings, self._tokenizer = settings, tokenizer
        has_texts = any(part.record != "messages" for part in mixture_configs(data))
        opening = required_opening(tokenizer, data.prepend_bos) if has_texts else ()
        self._prompts = [with_opening(tokenizer.encode(prompt), opening) for prompt in settings.prompts]
        for prompt, tokens in zip(settings.prompts, self._prompts, strict=True):
            if not len(tokens):
                raise ConfigError(
                    f"samples: prompt {prompt!r} is no token of tokenizer '{tokenizer.name}'; give another text in "
                    "samples.prompts"
                )
            if longest is not None and len(tokens) + settings.max_new_tokens > longest:
                raise ConfigError(
                    f"samples: prompt '{prompt}' of {len(tokens)} tokens and samples.max_new_tokens "
                    f"{settings.max_new_tokens} are more than the model's {longest} positions; lower max_new_tokens"
                )

    def run(self, step: int, stage: PipelineStage) -> tuple[Sample, ...]:
        """Write on from every prompt after a step."""
        most, end_id = self.settings.max_new_tokens, self._tokenizer.eos_id
        texts = (self._tokenizer.decode(greedy_tokens(stage, tokens, most, end_id)) for tokens in self._prompts)
        prompts = zip(self.settings.prompts, texts, strict=True)
        return tuple(Sample(step=step, prompt=prompt, text=text) for prompt, text in prompts)


@torch.no_grad()
def greedy_tokens(stage: PipelineStage, prompt: NDArray[np.int32], most: int, end_id: int | None) -> NDArray[np.int64]:
    """Return the likeliest tokens after a prompt, at most so many; int64[n], without the token that ends it."""
    total = len(prompt) + most
    store = ForwardStore({0: total}, ())
    stage.begin_step({0: total})
    written: list[int] = []
    coming, start = torch.from_numpy(prompt.astype(np.int64)).to(stage.device), 0
    while len(written) < most:
        stop = start + len(coming)
        positions = torch.arange(start, stop, device=stage.device)
        pack = PackTokens((Range(0, start, stop),), coming, torch.full_like(coming, -100), positions)
        hidden = stage.forward(pack, None, store)
        token = int(stage.model.logits(hidden[-1:]).argmax())
        if token == end_id:
            break
        written.append(token)
        coming, start = torch.tensor([token], device=stage.device), stop
    store.end_documents([0])
    return np.array(written, np.int64)


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
    ) -> None:
        self.settings, self._strategy = settings, strategy
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
        run_planner = RunPlanner(planner, self._strategy, may_delay=False)
        return step_maker(self._loader, run_planner, mesh, options.max_pack_tokens)

    def _losses(self, planned: PlannedStep, state: RankState) -> "_BatchLosses":
        documents, step = planned.plan.documents, None
        if not state.mesh.is_idle:
            step = prepare_step(forward_only(planned.plan), planned.tokens, state.mesh)
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
    samples: tuple[Sample, ...] = ()
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

    def __init__(
        self, validator: Validator | None, sampler: Sampler | None, *, keep_best: int, checkpoints: Path
    ) -> None:
        self._validator, self._sampler = validator, sampler
        self._keep_best, self._directory = keep_best, checkpoints
        self.digest = "" if validator is None else validator.digest
        """Digest of the settings that decide losses of the validation data; "" = there are none."""
        self.best: tuple[BestPass, ...] = ()
        """Passes over the validation data with the smallest losses, as `with_pass` orders them."""
        self.validated_steps = 0
        """Steps done when the validation data was last gone through; 0 = never."""

    def resume(self, progress: Progress) -> str:
        """Go on from a resumed checkpoint; return a warning, or ""."""
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
            f"{counted(best.steps_done, 'step')}. Checkpoints for them are removed at the next save like any older one"
        )

    def validates_after(self, steps_done: int) -> bool:
        """Say whether weights are read after so many steps, whether or not they are the last."""
        return self._validator is not None and self._validator.settings.is_due(steps_done)

    def after_step(self, steps_done: int, run: EvaluatedRun, *, is_stopping: bool) -> EvaluationResult:
        """Evaluate what is due after a step, nothing where all end. Collective; raises as `Validator.run`."""
        if is_stopping:
            return EvaluationResult()
        samples = self._write_samples(steps_done, run.state)
        return self.run_if_due(steps_done, run)._replace(samples=samples)

    def run_if_due(self, steps_done: int, run: EvaluatedRun) -> EvaluationResult:
        """Make the pass that is due after so many steps, unless it was made, also by an earlier start. Collective."""
        if self._validator is None or steps_done in (0, self.validated_steps):
            return EvaluationResult()
        settings = self._validator.settings
        if not (settings.is_due(steps_done) or (settings.at_end and run.is_last())):
            return EvaluationResult()
        planner = run.planner_of(run.state.layout)
        validation, stop_signal = self._validator.run(steps_done - 1, run.state, planner, run.stop_requested)
        if validation is None:
            return EvaluationResult(stop_signal=stop_signal)
        self.validated_steps = steps_done
        is_best = bool(self._keep_best) and self._record_pass(steps_done, validation.loss, run)
        return EvaluationResult(validation, is_best, stop_signal=stop_signal)

    def _record_pass(self, steps_done: int, loss: float | None, run: EvaluatedRun) -> bool:
        """Record a pass; return whether it is among the best whose checkpoints are there. Collective."""
        run.settle_saves()  # a save may write or remove one of them
        passes, mesh = [self.best], run.state.mesh
        if mesh.rank == 0:
            passes = [saved_passes(self._directory, self.best, self._keep_best)]
        with mesh.watch.waiting("which of the best checkpoints are there"):
            dist.broadcast_object_list(passes, src=0, group=mesh.control)
        self.best, is_best = with_pass(passes[0], steps_done, loss, self._keep_best)
        return is_best

    def _write_samples(self, steps_done: int, state: RankState) -> tuple[Sample, ...]:
        if self._sampler is None or steps_done % self._sampler.settings.every_steps:
            return ()
        mesh, stages = state.mesh, state.stages  # which waits for weights on every rank
        samples = self._sampler.run(steps_done - 1, stages[0]) if mesh.rank == 0 else ()
        with mesh.watch.waiting("the samples that rank 0 writes"):
            dist.barrier(group=mesh.control)
        return samples
