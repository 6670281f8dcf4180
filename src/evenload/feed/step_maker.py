"""`StepMaker`: global batch → plan → tokens on the ranks that train them → ledger; one step after the other.

    next_batch, lengths of coming ones ─► plan (rank 0) ─► broadcast ─► validate ─► ledger ─► exchange ─► PlannedStep

Every call is collective. Rank 0 plans, because a plan may depend on the machine (`fixed_exact`'s solver); all ranks get
its bytes and check them against their digest. An error on rank 0 is raised on every rank. A step holds the state that
decides those after it (`loader_state`, `planner_state`), so steps may be made ahead and states saved behind.

Every rank has read some of the documents; one all-to-all brings them to the ranks that train them. Who sends what
follows from plan and batch alone, so no sizes travel. Price: 4 bytes a token and rank that needs it (8 where labels
travel too, and 4 more where they count more than once), one message per pair of ranks.
"""

import functools
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import msgspec
import numpy as np

from evenload import errors
from evenload.data.batches import GlobalBatch, LoaderState, Peers
from evenload.data.blocks import TokenTable, all_label_counts, all_labels, join_tables
from evenload.data.loader import GlobalBatchLoader
from evenload.errors import EvenloadError
from evenload.stepplan.validate import validate_plan
from evenload.types.base import Frozen
from evenload.types.document import Document
from evenload.types.layout import ParallelLayout
from evenload.types.plan import StepPlan, decode_plan, encode_plan
from evenload.types.run import LayoutDecision

State = TypeVar("State", bound=msgspec.Struct)


class Planner(Protocol[State]):
    """Plans one step after the other, on rank 0 of the loader's peers."""

    @property
    def known_steps(self) -> int:
        """Return how many steps' lengths it reads, the coming one included."""

    @property
    def state_type(self) -> type[State]:
        """Return the type of what it carries from step to step; made without arguments before the first step."""

    def cuts(self, documents: Sequence[Document]) -> dict[int, list[int]]:
        """Return the trees that are to be planned in parts, by doc_id, and where (`TreeShape.parts`); of new ones."""

    def plan_step(
        self,
        step: int,
        documents: tuple[Document, ...],
        state: State,
        *,
        coming: Sequence[tuple[Document, ...]],
        is_last: bool,
    ) -> tuple[StepPlan, State, LayoutDecision | None]:
        """Return the plan, the state after it, and how its layout was decided (None where it cannot change). Raises a
        `ConfigError`, `DataError` or `InfeasiblePlanError` where there is no such plan.

        Args:
            documents: those that plans of earlier steps deferred, then the new ones.
            coming: documents of the batches that follow, as many as are known.
            is_last: the data has ended, so nothing may be deferred.
        """


@dataclass(frozen=True, eq=False, kw_only=True)
class PlannedStep(Generic[State]):
    """Holds one step with its tokens.

    Args:
        epoch: of its new documents; a last step of deferred documents belongs to the last epoch.
        tokens: of the documents of this rank's replica.
        loader_state, planner_state: to go on after this step.
        ledger_lines: what became of all documents and tokens, after this step.
        plan_time_s: seconds that rank 0 spent planning.
        origin: returns the place where a document was read; part_of: the number of its part of the mixture.
        decision: about the layout; None where it cannot change.
    """

    epoch: int
    plan: StepPlan
    tokens: TokenTable
    loader_state: LoaderState
    planner_state: State
    ledger_lines: tuple[str, ...]
    plan_time_s: float
    origin: Callable[[int], str]
    part_of: Callable[[int], int]
    decision: LayoutDecision | None = None


class _Reply(Frozen):
    """Holds what rank 0 broadcasts: a plan and the encoded state after it, or an error of `evenload.errors` by name."""

    plan: bytes = b""
    state: bytes = b""
    cuts: dict[int, list[int]] = msgspec.field(default_factory=dict)
    decision: LayoutDecision | None = None
    plan_time_s: float = 0.0
    error: str = ""
    text: str = ""


class StepMaker(Generic[State]):
    """Makes the steps of one run.

    Args:
        replicas: returns, for every rank of the loader's peers, the replica that it trains in a layout; None = none.
        waiting: entered around every wait for other ranks, with what is waited for; names them where they fail.
    """

    def __init__(
        self,
        loader: GlobalBatchLoader,
        planner: Planner[State],
        *,
        replicas: Callable[[ParallelLayout], Sequence[int | None]],
        max_pack_tokens: int,
        waiting: Callable[[str], AbstractContextManager[None]] = lambda what: nullcontext(),
    ) -> None:
        self.loader, self.planner = loader, planner
        self.planner_state = planner.state_type()
        """The state after the last step made; to be set where a run is resumed."""
        self._waiting, self._replicas, self._max_pack_tokens = waiting, replicas, max_pack_tokens

    def next(self, steps_left: int | None = None) -> PlannedStep[State] | None:
        """Return the next step; None when the data has ended. Collective; an error is raised on every rank.

        Args:
            steps_left: of the run, this one included; later batches decide nothing. None = all.
        """
        with self._waiting("the documents of a coming step"):
            batch = self.loader.next_batch()
        if batch is None:
            return None
        coming: tuple[tuple[Document, ...], ...] = ()
        if (num_coming := min(self.planner.known_steps, steps_left or self.planner.known_steps) - 1) > 0:
            with self._waiting("the lengths of coming steps"):
                coming = self.loader.coming(num_coming)
        with self._waiting(f"the plan of step {batch.step}"):
            reply = self._plan(batch, coming)
        plan, batch = decode_plan(reply.plan), self.loader.cut_trees(batch, reply.cuts)
        validate_plan(plan, max_pack_tokens=self._max_pack_tokens)
        # Also checks that the plan is of this batch: who sends what to whom follows from both.
        self.loader.record_step(batch, plan)
        by_replica = documents_by_replica(plan)
        wanted = [() if replica is None else by_replica[replica] for replica in self._replicas(plan.layout)]
        with self._waiting(f"the tokens of step {batch.step}"):
            tokens = exchange_tokens(batch, wanted, self.loader.peers)
        self.loader.check_ledger()
        self.planner_state = msgspec.msgpack.decode(reply.state, type=self.planner.state_type)
        return PlannedStep(
            epoch=batch.epoch - 1 if batch.is_last else batch.epoch,
            plan=plan,
            tokens=tokens,
            loader_state=self.loader.state(),
            planner_state=self.planner_state,
            ledger_lines=tuple(self.loader.summary()),
            plan_time_s=reply.plan_time_s,
            origin=functools.partial(self.loader.origin, batch.place),
            part_of=lambda doc_id: batch.place(doc_id).part,
            decision=reply.decision,
        )

    def _plan(self, batch: GlobalBatch, coming: tuple[tuple[Document, ...], ...]) -> _Reply:
        peers, reply, bug = self.loader.peers, _Reply(), None
        if peers.rank == 0:
            start_s = time.perf_counter()
            try:
                cuts = self.planner.cuts(batch.documents)
                documents = batch.carried + batch.cut_trees(cuts).documents
                plan, state, decision = self.planner.plan_step(
                    batch.step, documents, self.planner_state, coming=coming, is_last=batch.is_last
                )
                plan_time_s = time.perf_counter() - start_s
                encoded = {"plan": encode_plan(plan), "state": msgspec.msgpack.encode(state)}
                reply = _Reply(**encoded, cuts=cuts, decision=decision, plan_time_s=plan_time_s)
            except EvenloadError as error:
                reply = _Reply(error=type(error).__name__, text=str(error))
            except Exception as error:  # the other ranks wait for a reply, without one until their time limit
                text = f"planning step {batch.step} failed on rank 0: {error!r}; please report this as a bug"
                reply, bug = _Reply(error="EvenloadError", text=text), error
        reply = msgspec.msgpack.decode(peers.broadcast(msgspec.msgpack.encode(reply)), type=_Reply)
        if bug is not None:
            raise bug
        if reply.error:
            raise getattr(errors, reply.error)(reply.text)
        return reply


def documents_by_replica(plan: StepPlan) -> tuple[tuple[int, ...], ...]:
    """Return the doc_ids with a slice in each replica's packs, ascending."""
    return tuple(
        tuple(sorted({piece.doc_id for pack in (*packs.forward, *packs.backward) for piece in pack.slices}))
        for packs in plan.pack_plans
    )


def exchange_tokens(batch: GlobalBatch, wanted: Sequence[Sequence[int]], peers: Peers) -> TokenTable:
    """Return this rank's documents, where `wanted` are the doc_ids of every rank of `peers`, each once. Collective."""
    if peers.size == 1:
        return batch.tokens if len(wanted[0]) == len(batch.tokens) else batch.tokens.select(wanted[0])
    lengths = {document.doc_id: document.num_tokens for document in batch.documents + batch.carried}
    rank = peers.rank
    tables = [batch.tokens.select([doc_id for doc_id in documents if doc_id in batch.tokens]) for documents in wanted]
    incoming: list[list[int]] = [[] for _ in range(peers.size)]
    for doc_id in wanted[rank]:
        incoming[batch.place(doc_id).block.key.owner(peers.size)].append(doc_id)
    columns = [[table.tokens for table in tables]]  # one after the other, each of all documents
    if batch.has_labels:
        columns.append([all_labels(table) for table in tables])
    if batch.has_label_counts:
        columns.append([all_label_counts(table) for table in tables])
    outgoing = [np.concatenate(parts) if len(parts) > 1 else parts[0] for parts in zip(*columns, strict=True)]
    sizes = [len(columns) * sum(lengths[doc_id] for doc_id in documents) for documents in incoming]
    received = peers.exchange(outgoing, sizes)
    arrived: list[TokenTable] = []
    for documents, content in zip(incoming, received, strict=True):
        tokens, *others = np.split(content, len(columns))
        labels = others.pop(0) if batch.has_labels else None
        counts = others.pop(0) if batch.has_label_counts else None
        edges = np.cumsum([0, *(lengths[doc_id] for doc_id in documents)], dtype=np.int64)
        arrived.append(TokenTable(np.array(documents, np.int64), edges, tokens, labels, counts))
    return join_tables(arrived)
