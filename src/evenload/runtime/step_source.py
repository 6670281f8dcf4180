"""`StepSource`: batches, plans and tokens of coming steps, prepared while the current one trains.

A thread on every rank takes part in the next global batch; rank 0 plans it and broadcasts the plan's bytes; every rank
checks the digest; tokens go to the ranks that train them. `data.prefetch_steps` steps are prepared ahead, no more: then
the thread waits. The states of loader and planner after a step travel with that step, so a checkpoint holds what was
trained, not what was prepared ahead. An error on one rank reaches all ranks as the same error.
"""

import queue
import threading
import time
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import torch.distributed as dist

from evenload import errors
from evenload.data.exchange import documents_by_replica, exchange_tokens
from evenload.data.loader import GlobalBatch, GlobalBatchLoader
from evenload.data.state import encode_state
from evenload.data.token_table import TokenTable
from evenload.errors import EvenloadError
from evenload.plan.delay import DelayState
from evenload.plan.planner import StepPlanner
from evenload.plan.strategies import require_trainable
from evenload.plan.validate import validate_plan
from evenload.runtime.mesh import Mesh
from evenload.types.plan import StepPlan, decode_plan, encode_plan


@dataclass(frozen=True, eq=False, kw_only=True)
class PreparedStep:
    """One step, ready to run.

    Args:
        tokens: of the documents of this rank's replica.
        loader_state: encoded; to go on after this step.
        planner_state: which documents wait since when; to go on after this step.
        ledger_lines: the account after this step.
        plan_time_s: seconds rank 0 spent planning (the same number on all ranks).
    """

    plan: StepPlan
    tokens: TokenTable
    loader_state: bytes
    planner_state: DelayState
    ledger_lines: tuple[str, ...]
    plan_time_s: float


class StepSource:
    """Iterates over prepared steps; the last one is followed by None.

    Args:
        first_step: number of the first step (after a resume not 0).
        last_step: stop before this step; None = when the data ends.
        strategy: planner's name.
        planner_state: after the step before the first.

    Raises:
        ConfigError: a strategy that the runtime cannot run.
    """

    def __init__(
        self,
        loader: GlobalBatchLoader,
        planner: StepPlanner,
        strategy: str,
        mesh: Mesh,
        *,
        first_step: int,
        last_step: int | None,
        max_pack_tokens: int,
        planner_state: DelayState,
    ) -> None:
        require_trainable(strategy)
        self._loader, self._planner, self._strategy, self._mesh = loader, planner, strategy, mesh
        self._last = last_step
        self._max_pack_tokens = max_pack_tokens
        self._planner_state = planner_state
        self._step = first_step
        self._ready: queue.SimpleQueue[PreparedStep | BaseException | None] = queue.SimpleQueue()
        self._room = threading.Semaphore(loader.config.prefetch_steps)
        self._is_ahead = loader.config.prefetch_steps > 0
        if self._is_ahead:
            # A daemon: when the main thread fails, the process must end even if this thread waits for a dead peer.
            self._thread = threading.Thread(target=self._prepare_all, name="evenload-prepare", daemon=True)
            self._thread.start()

    def next(self) -> PreparedStep | None:
        """The next step; None at the end. Raises what preparing it raised."""
        if not self._is_ahead:
            return self._prepare_next()
        item = self._ready.get()
        self._room.release()
        if isinstance(item, BaseException):
            raise item
        if item is None:
            self._thread.join()
        return item

    def _prepare_all(self) -> None:
        try:
            while True:
                self._room.acquire()
                prepared = self._prepare_next()
                self._ready.put(prepared)
                if prepared is None:
                    return
        except BaseException as error:
            self._ready.put(error)

    def _prepare_next(self) -> PreparedStep | None:
        prepared = None
        if self._last is None or self._step < self._last:
            prepared = self._prepare(self._step)
            self._step += 1
        if prepared is None:
            self._loader.close()
        return prepared

    def _prepare(self, step: int) -> PreparedStep | None:
        with self._mesh.watch.waiting(f"the documents of step {step}"):
            batch = self._loader.next_batch()
        if batch is None:
            return None
        plan, plan_time_s = self._shared_plan(step, batch)
        validate_plan(plan, max_pack_tokens=self._max_pack_tokens)
        lengths = {document.doc_id: document.num_tokens for document in batch.documents + batch.carried}
        by_replica = documents_by_replica(plan, lengths)
        wanted = [by_replica[plan.layout.dp_rank(rank)] for rank in range(plan.layout.world_size)]
        with self._mesh.watch.waiting(f"the tokens of step {step}"):
            tokens = exchange_tokens(batch, wanted, self._loader.peers)
        self._loader.note_step(batch, plan)
        self._loader.check_ledger()
        return PreparedStep(
            plan=plan,
            tokens=tokens,
            loader_state=encode_state(self._loader.state()),
            planner_state=self._planner_state,
            ledger_lines=tuple(self._loader.summary()),
            plan_time_s=plan_time_s,
        )

    def _shared_plan(self, step: int, batch: GlobalBatch) -> tuple[StepPlan, float]:
        """Rank 0's plan and the seconds it took, or rank 0's error, on every rank."""
        outcome: list[_Planned | _Refused | None] = [None]
        if self._mesh.rank == 0:
            start_s = time.perf_counter()
            try:
                proposal = self._planner.propose(
                    step,
                    batch.carried + batch.documents,
                    self._strategy,
                    state=self._planner_state,
                    is_last=batch.is_last,
                )
                plan, state = encode_plan(proposal.require_feasible()), msgspec.msgpack.encode(proposal.state)
                outcome[0] = _Planned(plan, state, time.perf_counter() - start_s)
            except EvenloadError as error:
                outcome[0] = _Refused(type(error).__name__, str(error))
        with self._mesh.watch.waiting(f"the plan of step {step}", "rank 0"):
            dist.broadcast_object_list(outcome, src=0, group=self._mesh.planning)
        answer = outcome[0]
        if isinstance(answer, _Refused):
            raise getattr(errors, answer.error)(answer.text)
        assert answer is not None
        self._planner_state = msgspec.msgpack.decode(answer.state, type=DelayState)
        return decode_plan(answer.plan), answer.plan_time_s


class _Planned(NamedTuple):
    """Encoded plan and planner state."""

    plan: bytes
    state: bytes
    plan_time_s: float


class _Refused(NamedTuple):
    """An error of `evenload.errors` by name."""

    error: str
    text: str
