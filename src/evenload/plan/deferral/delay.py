"""`DelayState`: what a strategy that moves documents between steps must remember, and the account of the delay.

A strategy normally rearranges one global batch. `wlb` and the `fixed_*` strategies with a window of several batches
defer documents; those come back with the next batch (`data.loader` carries them) and are trained within
`max_delay_steps`. The state is explicit: given in, handed out, small, serialisable, and never holds tokens.

    state ─┐
    batch ─┴─► strategy ─► packs of this step, documents deferred, next state
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenload.errors import DataError
from evenload.plan.problem.step_problem import ReplicaChoice
from evenload.types.base import Frozen

FADE = 31 / 32
"""Weight of a step in the recent delay, each step later."""


class Waiting(Frozen):
    """A document that was deferred.

    Args:
        since_step: the step with whose batch it came.
        is_left_over: it was due but did not fit; it goes first next time.
    """

    doc_id: int
    since_step: int
    is_left_over: bool = False


class DelayState(Frozen):
    """Everything between two steps.

    Args:
        waiting: documents that were deferred, oldest first.
        outlier_lengths: `wlb`'s thresholds `L_1 < L_2 < …`, as tuned so far.
        sample: lengths seen so far, until there are enough for the last tuning.
        num_batches: batches seen.
        waited_tokens, arrived_tokens: tokens that were deferred, once for every step, and tokens that came; older
            steps fade by `FADE`.
    """

    waiting: tuple[Waiting, ...] = ()
    outlier_lengths: tuple[int, ...] = ()
    sample: tuple[int, ...] = ()
    num_batches: int = 0
    waited_tokens: float = 0.0
    arrived_tokens: float = 0.0

    def recent_delay_steps(self) -> float:
        """Mean token delay of the recent steps, by Little's law; 0 before the first."""
        return self.waited_tokens / self.arrived_tokens if self.arrived_tokens else 0.0


@dataclass(frozen=True, eq=False)
class Arrivals:
    """How the documents of a problem came here.

    Args:
        step: the step to be planned.
        since_step: int64[n], the step with whose batch each document came.
        is_left_over: bool[n].
        is_last: no batch follows, so nothing may be deferred.
    """

    step: int
    since_step: NDArray[np.int64]
    is_left_over: NDArray[np.bool_]
    is_last: bool
    state: DelayState

    @property
    def is_new(self) -> NDArray[np.bool_]:
        """bool[n]: documents that no earlier step deferred."""
        return self.since_step == self.step

    def age_steps(self) -> NDArray[np.int64]:
        """int64[n]: by how many steps each document is late if it is trained now."""
        return self.step - self.since_step


@dataclass(frozen=True, eq=False)
class DelayedChoice:
    """What a delaying strategy answers; documents in none of the choices are deferred.

    Args:
        choices: one per replica.
        left_over: indices of documents that were due and did not fit.
        outlier_lengths, sample: for the next state.
    """

    choices: tuple[ReplicaChoice, ...]
    left_over: frozenset[int] = frozenset()
    outlier_lengths: tuple[int, ...] = ()
    sample: tuple[int, ...] = ()


def arrivals_of(step: int, doc_ids: NDArray[np.int64], state: DelayState, is_last: bool) -> Arrivals:
    """Match a batch with the state.

    Raises:
        DataError: a document that was deferred did not come back.
    """
    waiting = {one.doc_id: one for one in state.waiting}
    lost = sorted(waiting.keys() - set(doc_ids.tolist()))
    if lost:
        raise DataError(
            f"step {step}: documents {lost[:5]} were deferred by an earlier step and are not in the batch; plan the "
            "batch's new documents together with those carried over"
        )
    since = [waiting[doc_id].since_step if doc_id in waiting else step for doc_id in doc_ids.tolist()]
    left_over = [doc_id in waiting and waiting[doc_id].is_left_over for doc_id in doc_ids.tolist()]
    return Arrivals(step, np.array(since, np.int64), np.array(left_over, bool), is_last, state)


def trained_documents(choices: Iterable[ReplicaChoice]) -> NDArray[np.int64]:
    """Indices of all documents in the choices, ascending."""
    return np.sort(np.concatenate([choice.documents for choice in choices]))


def state_after(
    arrivals: Arrivals, doc_ids: NDArray[np.int64], num_tokens: NDArray[np.int64], answer: DelayedChoice
) -> DelayState:
    """The state for the next step."""
    before = arrivals.state
    deferred = np.setdiff1d(np.arange(len(doc_ids)), trained_documents(answer.choices))
    oldest_first = deferred[np.lexsort((doc_ids[deferred], arrivals.since_step[deferred]))].tolist()
    return DelayState(
        waiting=tuple(
            Waiting(
                doc_id=int(doc_ids[index]),
                since_step=int(arrivals.since_step[index]),
                is_left_over=index in answer.left_over,
            )
            for index in oldest_first
        ),
        outlier_lengths=answer.outlier_lengths,
        sample=answer.sample,
        num_batches=before.num_batches + 1,
        waited_tokens=FADE * before.waited_tokens + int(num_tokens[deferred].sum()),
        arrived_tokens=FADE * before.arrived_tokens + int(num_tokens[arrivals.is_new].sum()),
    )


def mean_token_delay_steps(age_steps: NDArray[np.int64], num_tokens: NDArray[np.int64]) -> float:
    """Steps by which a trained token is late on average (WLB §7.4); 0 without tokens."""
    total = int(num_tokens.sum())
    return float((age_steps * num_tokens).sum() / total) if total else 0.0
