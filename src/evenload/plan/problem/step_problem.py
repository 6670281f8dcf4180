"""`StepProblem` in, `ReplicaChoice` out: what every strategy function maps."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from evenload.cost.pack_cost import PackCosts
from evenload.errors import ConfigError, DataError
from evenload.plan.problem.candidate import Candidate
from evenload.plan.problem.options import PlanOptions
from evenload.types.layout import ParallelLayout


@dataclass(frozen=True, eq=False)
class StepProblem:
    """One global batch to be planned.

    Args:
        doc_ids, num_tokens: int64[n], in arrival order.
        costs: seconds; also carries the model and the layout.
        cap_bytes: int64[R], memory of every pipeline rank; None = no limit.
        policy: int8[n], activation policy of every document (`cost.layer_counts.POLICIES`); None = all replay.
        host_device_bytes: of host memory, what each device may offload to; None = not limited.
    """

    doc_ids: NDArray[np.int64]
    num_tokens: NDArray[np.int64]
    costs: PackCosts
    cap_bytes: NDArray[np.int64] | None
    options: PlanOptions
    policy: NDArray[np.int8] | None = None
    host_device_bytes: int | None = None
    document_s: NDArray[np.float64] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "document_s", self.costs.document_seconds(self.num_tokens, self.policy))

    @property
    def layout(self) -> ParallelLayout:
        """Of the run."""
        return self.costs.layout

    @functools.cached_property
    def stored_s(self) -> float:
        """Forward + backward seconds of all documents where every activation is stored."""
        return float(self.costs.document_seconds(self.num_tokens, None).sum())

    def policy_of(self, documents: NDArray[np.int64]) -> NDArray[np.int8] | None:
        """The policies of some documents, as candidates want them."""
        return None if self.policy is None else self.policy[documents]

    def window_tokens(self, strategy: str) -> int:
        """The pack limit that strategies with fixed windows need.

        Raises:
            ConfigError: no limit was given.
            DataError: a document that may not be cut is longer.
        """
        window = self.options.max_pack_tokens
        if window is None:
            raise ConfigError(f"strategy {strategy} fills windows of max_pack_tokens; set it")
        self.require_whole_documents_fit(strategy)
        return window

    def require_whole_documents_fit(self, strategy: str) -> None:
        """Refuse documents beyond a pack's limit for a strategy that never cuts; the `DataError` names the longest."""
        window = self.options.max_pack_tokens
        if window is None or not len(self.num_tokens):
            return
        longest = int(self.num_tokens.argmax())
        if self.num_tokens[longest] > window:
            raise DataError(
                f"strategy {strategy}: document {self.doc_ids[longest]} has {self.num_tokens[longest]} tokens, "
                f"max_pack_tokens is {window} and {strategy} never cuts; raise max_pack_tokens, use "
                "overlong = split, truncate or drop, or use slimpack"
            )

    def require_causal(self, strategy: str) -> None:
        """Refuse a bidirectional model for a strategy that cuts its documents, by a `ConfigError`."""
        if not self.costs.model.causal:
            raise ConfigError(
                f"strategy {strategy}: model {self.costs.model.name} is bidirectional, every token sees the whole "
                "document, so documents cannot be sliced; use padded, best_fit or balanced"
            )


@dataclass(frozen=True, eq=False)
class ReplicaChoice:
    """The chosen candidate of one replica.

    Args:
        documents: int64[k], indices into the problem's arrays; `SliceColumns.doc` of the candidate counts these.
        note: what a reader of the result must know about how it was found; "" = nothing.
    """

    documents: NDArray[np.int64]
    candidate: Candidate
    note: str = ""


Planner = Callable[[StepProblem], tuple[ReplicaChoice, ...]]
"""A strategy: one global batch in, one choice a replica out."""
