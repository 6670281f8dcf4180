"""`StepSource`: batches and plans of coming steps, prepared while the current one trains.

A thread on every rank reads the next global batch; rank 0 plans it and broadcasts the plan's bytes; every
rank checks the digest. The loader's state after a step travels with that step, so a checkpoint holds what
was trained, not what was prepared ahead. An error on rank 0 reaches all ranks as the same error.
"""

import queue
import threading
import time
from dataclasses import dataclass

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from evenload.data.exchange import documents_for_replica
from evenload.data.loader import GlobalBatchLoader
from evenload.data.state import encode_state
from evenload.errors import EvenloadError
from evenload.plan.planner import StepPlanner
from evenload.plan.validate import validate_plan
from evenload.runtime.mesh import Mesh
from evenload.types.plan import StepPlan, decode_plan, encode_plan

_PREPARED_AHEAD = 1


@dataclass(frozen=True, eq=False, kw_only=True)
class PreparedStep:
    """One step, ready to run.

    Args:
        tokens: int32[num_tokens] by doc_id, of this rank's replica.
        loader_state: encoded; to go on after this step.
        ledger_lines: the account after this step.
        plan_time_s: seconds rank 0 spent planning (the same number on all ranks).
    """

    plan: StepPlan
    tokens: dict[int, NDArray[np.int32]]
    loader_state: bytes
    ledger_lines: tuple[str, ...]
    plan_time_s: float


class StepSource:
    """Iterates over prepared steps; the last one is followed by None.

    Args:
        first_step: number of the first step (after a resume not 0).
        last_step: stop before this step; None = when the data ends.
        strategy: planner's name.
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
    ) -> None:
        self._loader, self._planner, self._strategy, self._mesh = loader, planner, strategy, mesh
        self._first, self._last = first_step, last_step
        self._max_pack_tokens = max_pack_tokens
        self._ready: queue.Queue[PreparedStep | BaseException | None] = queue.Queue(_PREPARED_AHEAD)
        # A daemon: when the main thread fails, the process must end even if this thread waits for a dead peer.
        self._thread = threading.Thread(target=self._prepare_all, name="evenload-prepare", daemon=True)
        self._thread.start()

    def next(self) -> PreparedStep | None:
        """The next step; None at the end. Raises what preparing it raised."""
        item = self._ready.get()
        if isinstance(item, BaseException):
            raise item
        if item is None:
            self._thread.join()
        return item

    def _prepare_all(self) -> None:
        try:
            step = self._first
            while self._last is None or step < self._last:
                prepared = self._prepare(step)
                if prepared is None:
                    break
                self._ready.put(prepared)
                step += 1
            self._ready.put(None)
        except BaseException as error:
            self._ready.put(error)

    def _prepare(self, step: int) -> PreparedStep | None:
        batch = self._loader.next_batch()
        if batch is None:
            return None
        message: list[tuple[bytes, float] | str | None] = [None]
        if self._mesh.rank == 0:
            start_s = time.perf_counter()
            try:
                plan = self._planner.plan(step, batch.documents + batch.carried, self._strategy)
                message = [(encode_plan(plan), time.perf_counter() - start_s)]
            except EvenloadError as error:
                dist.broadcast_object_list([f"{error}"], src=0, group=self._mesh.planning)
                raise
        dist.broadcast_object_list(message, src=0, group=self._mesh.planning)
        answer = message[0]
        if not isinstance(answer, tuple):
            raise EvenloadError(f"planning failed on rank 0: {answer}")
        plan = decode_plan(answer[0])
        validate_plan(plan, max_pack_tokens=self._max_pack_tokens)
        self._loader.note_step(batch, plan)
        self._loader.check_ledger()
        return PreparedStep(
            plan=plan,
            tokens=documents_for_replica(plan, self._mesh.dp_rank, batch.tokens),
            loader_state=encode_state(self._loader.state()),
            ledger_lines=tuple(self._loader.summary()),
            plan_time_s=answer[1],
        )
