"""`Validator`: the losses of the validation data with the weights as they are; everything else stays as it was.

    read a batch ─► plan it as a step of the layout that runs ─► drop its backwards ─► run the forwards ─► add up losses

The strategy and the limit of packs are those of training, without a limit of memory: forwards hold one pack and the
keys and values of documents that are cut, less than training one pack of that size. The loader is its own and begins
anew every time. Ranks read and plan together on the control group, in the training thread: the thread that makes coming
training steps goes on beside it on its own group. Documents that a strategy would put off to a later step are computed
with their batch.

Price: about a third of training steps of as many tokens, and their reading and planning, which nothing hides; so
validation takes its share of a run's time by `validation.every_steps` and the size of its data.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from evenload.config.sections import validation_data
from evenload.config.train_config import TrainConfig
from evenload.data.batch.loader import GlobalBatchLoader
from evenload.data.config import DataConfig
from evenload.data.encoding.tokenize import DocumentTokenizer
from evenload.errors import DataError
from evenload.feed.step_maker import PlannedStep, StepMaker
from evenload.plan.planner import StepPlanner
from evenload.plan.reconfiguration.flex_planner import FlexPlanner
from evenload.runtime.comm.mesh import Mesh, Meshes
from evenload.runtime.comm.scalars import most_of_ranks
from evenload.runtime.comm.torch_peers import TorchPeers
from evenload.runtime.prepare import prepare_step
from evenload.runtime.stages.rank_state import RankState
from evenload.stepplan.forward_only import forward_only
from evenload.types.validation import LossOf, Validation


class EndedPass(NamedTuple):
    """Losses, None where the pass was abandoned; the signal to stop that any rank got until then, 0 = none."""

    validation: Validation | None
    stop_signal: int


class Validator:
    """Of a run with `[validation]`, on one rank; `tokenizer` is the run's. Collective; `DataError` where the data has
    no document, or its first ones cannot be read."""

    def __init__(
        self, config: TrainConfig, tokenizer: DocumentTokenizer | None, vocab_size: int, meshes: Meshes
    ) -> None:
        assert config.validation is not None
        self._settings, self._config, self._meshes = config.validation, config, meshes
        data = validation_data(config.data, config.validation)
        peers = TorchPeers(meshes.start.control)
        self._loader = GlobalBatchLoader(data, tokenizer, peers=peers, vocab_size=vocab_size)
        self._begin, self._sources = self._loader.state(), _sources_of(data)
        with meshes.start.watch.waiting("the first validation documents"):
            self._require_documents()

    def _require_documents(self) -> None:
        """Before the first step: a mistake that a pass would find costs nothing yet."""
        try:
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

    def is_due(self, steps_done: int) -> bool:
        """After so many steps, whether or not they are the last."""
        return self._settings.is_due(steps_done)

    def is_due_or_last(self, steps_done: int, is_last: Callable[[], bool]) -> bool:
        """After so many steps; `is_last` is asked where that decides."""
        return self.is_due(steps_done) or (self._settings.at_end and is_last())

    def run(
        self,
        step: int,
        state: RankState,
        planner: StepPlanner | FlexPlanner,
        asked_to_stop: Callable[[], int] = lambda: 0,
    ) -> EndedPass:
        """The losses after a step, the same on every rank. Collective.

        Args:
            planner: that plans the run's steps.
            asked_to_stop: signal that this rank got, or 0; asked before every batch, when all abandon the pass if any
                got one, and at the end.

        Raises:
            DataError: a record cannot be read; InfeasiblePlanError: a document does not fit into a pack.
        """
        from_s = time.perf_counter()
        mesh = state.mesh
        inside = planner.planner_of(state.layout) if isinstance(planner, FlexPlanner) else planner
        maker = self._maker(inside, mesh)
        self._loader.load_state(self._begin)
        with state.optimizer.average_as_weights() if self._settings.of_average else nullcontext():
            try:
                found, stop_signal = self._batches(maker, state, asked_to_stop)
                account = self._loader.ledger.state
            finally:
                self._loader.close()
        if found is None:
            return EndedPass(None, stop_signal)
        columns = _BatchLosses(*(np.concatenate(parts) for parts in zip(*(one.columns for one in found), strict=True)))
        validation = Validation(
            step=step,
            whole=columns.loss_of("all", np.ones(len(columns.losses), np.bool_)),
            by_length=tuple(columns.by_length()),
            by_source=tuple(columns.by_source(self._sources)),
            seconds=time.perf_counter() - from_s,
            of_average=self._settings.of_average,
            left_out=tuple((reason, one.documents, one.tokens) for reason, one in account.dropped.items()),
        )
        return EndedPass(validation, stop_signal)

    def _batches(
        self, maker: StepMaker, state: RankState, asked_to_stop: Callable[[], int]
    ) -> tuple[list["_BatchLosses"] | None, int]:
        """None where ranks agreed to abandon the pass; the signal."""
        found: list[_BatchLosses] = []
        while self._settings.batches is None or len(found) < self._settings.batches:
            if (planned := maker.next()) is None:
                break
            if stop_signal := _agreed(asked_to_stop(), state.mesh):
                return None, stop_signal
            found.append(self._losses(planned, state, state.mesh))
        return found, _agreed(asked_to_stop(), state.mesh)

    def _maker(self, planner: StepPlanner, mesh: Mesh) -> StepMaker:
        options = msgspec.structs.replace(planner.options, policy="replay")
        assert options.max_pack_tokens is not None, "`run_planner` decides it"
        return StepMaker(
            self._loader,
            StepPlanner(
                planner.costs.model, planner.costs.coefficients, planner.layout, None, options, host=planner.host
            ),
            self._config.plan.strategy,
            replicas=lambda layout: layout.replicas(mesh.num_ranks),
            max_pack_tokens=options.max_pack_tokens,
            may_delay=False,
            waiting=mesh.watch.waiting,
        )

    def _losses(self, planned: PlannedStep, state: RankState, mesh: Mesh) -> "_BatchLosses":
        plan = planned.plan
        step = None
        if not mesh.is_idle:
            step = prepare_step(forward_only(plan), planned.tokens, mesh, self._config.parallel.cp_exchange)
        losses = state.losses(step, len(plan.documents)).numpy()
        documents = plan.documents
        return _BatchLosses(
            np.array([document.num_tokens for document in documents], np.int64),
            np.array([document.num_label_tokens for document in documents], np.int64),
            np.array([planned.part_of(document.doc_id) for document in documents], np.int64),
            losses,
        )


class _BatchLosses:
    """Documents as columns: tokens, labels and part of the mixture, int64[n] each, and sums of losses, float64[n]."""

    def __init__(
        self,
        tokens: NDArray[np.int64],
        labels: NDArray[np.int64],
        parts: NDArray[np.int64],
        losses: NDArray[np.float64],
    ) -> None:
        self.tokens, self.labels, self.parts, self.losses = tokens, labels, parts, losses

    @property
    def columns(self) -> tuple[NDArray, ...]:
        return self.tokens, self.labels, self.parts, self.losses

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
        """By powers of two."""
        classes = np.frexp(self.tokens)[1] - 1
        for one in np.unique(classes).tolist():
            low, high = 2**one, 2 ** (one + 1) - 1
            yield self.loss_of(f"{low}-{high}" if one else "1", classes == one)

    def by_source(self, names: Sequence[str]) -> Iterable[LossOf]:
        for part, name in enumerate(names):
            yield self.loss_of(name, self.parts == part)


def _agreed(stop_signal: int, mesh: Mesh) -> int:
    """The largest signal of any rank. Collective."""
    with mesh.watch.waiting("whether to stop validating"):
        return int(most_of_ranks(stop_signal, mesh))


def _sources_of(data: DataConfig) -> tuple[str, ...]:
    """Names of the parts."""
    return tuple(part.name for part in data.mixture) or (", ".join(data.sources),)
