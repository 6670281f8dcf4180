"""`StepPlanner`: a global batch in, one sealed `StepPlan` out; the only planning call the runtime makes.

Pure and deterministic: the same documents, options and coefficients give the same plan, bit for bit, on every
rank, so ranks may plan each for itself and compare digests. Planning works on numpy columns; objects are made
once, for the chosen candidates.
"""

from dataclasses import dataclass
from typing import cast

import numpy as np

from evenload.cost.coefficients import CostCoefficients
from evenload.cost.pack_cost import PackCosts, padded_pack_tokens
from evenload.errors import DataError, InfeasiblePlanError
from evenload.plan.candidate import imbalance
from evenload.plan.options import PlanOptions
from evenload.plan.problem import ReplicaChoice, StepProblem
from evenload.plan.strategies import strategy_named
from evenload.types.document import Document
from evenload.types.layout import ParallelLayout
from evenload.types.micropack import PackPlan
from evenload.types.model import ModelSpec
from evenload.types.plan import LeftOut, PackTimes, Prediction, StepPlan, seal


@dataclass(frozen=True, eq=False)
class Proposal:
    """A plan with what is known about it, within memory or not.

    Args:
        plan: sealed.
        choices: per replica the chosen columns, tasks, actions and simulation.
        why: why the plan does not fit memory; "" when it does.
        bubble_fraction: share of all ranks' step time in which no pack is computed.
        imbalance_forward, imbalance_backward: max/mean pack time on the slowest stage, worst replica.
        imbalance_dp: max/mean makespan over replicas.
        max_pack_tokens: of the largest pack, padding included.
        cap_violations: packs above the token limit of the options.
    """

    plan: StepPlan
    choices: tuple[ReplicaChoice, ...]
    why: str
    bubble_fraction: float
    imbalance_forward: float
    imbalance_backward: float
    imbalance_dp: float
    max_pack_tokens: int
    cap_violations: int

    @property
    def feasible(self) -> bool:
        """It fits memory."""
        return not self.why


class StepPlanner:
    """Plans steps of one run.

    Args:
        model, coefficients, layout: of the run.
        memory_cap_bytes: usable bytes of one device; None = not limited.
        options: limits and search space.

    Raises:
        ConfigError: the layout is not supported yet or belongs to another model.
    """

    def __init__(
        self,
        model: ModelSpec,
        coefficients: CostCoefficients,
        layout: ParallelLayout,
        memory_cap_bytes: int | None = None,
        options: PlanOptions | None = None,
    ) -> None:
        self.costs = PackCosts(model, coefficients, layout)
        self.layout = layout
        self.memory_cap_bytes = memory_cap_bytes
        self.options = options or PlanOptions()
        self._after_pipeline_s = self.costs.reduction_seconds() + self.costs.optimizer_seconds()

    def plan(
        self, step: int, documents: tuple[Document, ...], strategy: str, left_out: tuple[LeftOut, ...] = ()
    ) -> StepPlan:
        """Plan a step that fits memory.

        Args:
            step: number of the optimizer step.
            documents: the global batch in arrival order; ids are unique.
            strategy: a name of `plan.strategies`.
            left_out: documents of the batch that are not trained, recorded in the plan.

        Raises:
            ConfigError: unknown strategy or unusable options.
            DataError: a repeated document id, or a document that the strategy cannot fit into a pack.
            InfeasiblePlanError: every candidate exceeds memory or the token limit.
        """
        proposal = self.propose(step, documents, strategy, left_out)
        if not proposal.feasible:
            raise InfeasiblePlanError(f"step {step}: {proposal.why}")
        return proposal.plan

    def propose(
        self, step: int, documents: tuple[Document, ...], strategy: str, left_out: tuple[LeftOut, ...] = ()
    ) -> Proposal:
        """As `plan`, with figures, and without refusing a plan that exceeds memory."""
        planner = strategy_named(strategy)
        problem = self._problem(step, documents)
        choices = planner(problem)
        plan = self._step_plan(step, documents, strategy, left_out, problem, choices)
        return self._proposal(plan, choices)

    def _problem(self, step: int, documents: tuple[Document, ...]) -> StepProblem:
        doc_ids = np.array([document.doc_id for document in documents], dtype=np.int64)
        num_tokens = np.array([document.num_tokens for document in documents], dtype=np.int64)
        if len(np.unique(doc_ids)) != len(doc_ids):
            values, counts = np.unique(doc_ids, return_counts=True)
            raise DataError(
                f"step {step}: document {values[counts.argmax()]} appears {counts.max()} times in the global batch; "
                "document ids must be unique within a step"
            )
        if len(num_tokens) and num_tokens.min() < 1:
            shortest = int(num_tokens.argmin())
            raise DataError(
                f"step {step}: document {doc_ids[shortest]} has {num_tokens[shortest]} tokens, "
                "must have at least 1; drop it"
            )
        cap = None
        if self.memory_cap_bytes is not None:
            cap = np.full(self.layout.pp, self.memory_cap_bytes, dtype=np.int64)
        return StepProblem(doc_ids, num_tokens, self.costs, cap, self.options)

    def _step_plan(
        self,
        step: int,
        documents: tuple[Document, ...],
        strategy: str,
        left_out: tuple[LeftOut, ...],
        problem: StepProblem,
        choices: tuple[ReplicaChoice, ...],
    ) -> StepPlan:
        pack_plans, schedules, times = [], [], []
        for dp_rank, choice in enumerate(choices):
            found = choice.candidate
            doc_ids = problem.doc_ids[choice.documents]
            pack_plans.append(
                PackPlan(
                    dp_rank=dp_rank,
                    forward=found.forward.packs("forward", doc_ids, _slowest_stage(found.tasks.forward_s)),
                    backward=found.backward.packs("backward", doc_ids, _slowest_stage(found.tasks.backward_s)),
                )
            )
            schedules.append(found.actions.to_schedule())
            times.append(
                PackTimes(
                    forward_s=_rows(found.tasks.forward_s),
                    backward_s=_rows(found.tasks.backward_s),
                    p2p_forward_s=tuple(found.tasks.p2p_forward_s.tolist()),
                    p2p_backward_s=tuple(found.tasks.p2p_backward_s.tolist()),
                )
            )
        per_replica_s = tuple(float(choice.candidate.makespan_s) for choice in choices)
        return seal(
            StepPlan(
                step=step,
                strategy=strategy,
                layout=self.layout,
                documents=documents,
                num_label_tokens=sum(document.num_label_tokens for document in documents),
                pack_plans=tuple(pack_plans),
                schedules=tuple(schedules),
                times=tuple(times),
                predicted=Prediction(
                    step_time_s=max(per_replica_s) + self._after_pipeline_s,
                    per_replica_s=per_replica_s,
                    peak_memory_bytes=max(int(c.candidate.simulation.peak_bytes.max()) for c in choices),
                ),
                left_out=left_out,
            )
        )

    def _proposal(self, plan: StepPlan, choices: tuple[ReplicaChoice, ...]) -> Proposal:
        found = [choice.candidate for choice in choices]
        used = [one for one in found if one.forward.num_packs]
        busy_s = sum(float(one.tasks.forward_s.sum() + one.tasks.backward_s.sum()) for one in found)
        makespan_s = np.array([one.makespan_s for one in found])
        tokens = np.concatenate(
            [padded_pack_tokens(columns) for one in found for columns in (one.forward, one.backward)]
        )
        limit = self.options.max_pack_tokens
        return Proposal(
            plan=plan,
            choices=choices,
            why=self._memory_reason(plan.strategy, choices),
            bubble_fraction=1.0 - busy_s / (self.layout.dp * self.layout.pp * plan.predicted.step_time_s),
            imbalance_forward=max((imbalance(one.tasks.forward_s) for one in used), default=1.0),
            imbalance_backward=max((imbalance(one.tasks.backward_s) for one in used), default=1.0),
            imbalance_dp=float(makespan_s.max() / makespan_s.mean()) if makespan_s.any() else 1.0,
            max_pack_tokens=int(tokens.max(initial=0)),
            cap_violations=0 if limit is None else int((tokens > limit).sum()),
        )

    def _memory_reason(self, strategy: str, choices: tuple[ReplicaChoice, ...]) -> str:
        if self.memory_cap_bytes is None or not any(choice.candidate.excess_bytes for choice in choices):
            return ""
        dp_rank = max(range(len(choices)), key=lambda rank: choices[rank].candidate.excess_bytes)
        peak = choices[dp_rank].candidate.simulation.peak_bytes
        rank = int(peak.argmax())
        return (
            f"strategy {strategy} needs {peak[rank] / 2**30:.1f} GiB on pipeline rank {rank} of replica {dp_rank}, "
            f"the device offers {self.memory_cap_bytes / 2**30:.1f} GiB; raise pp, or lower max_pack_tokens "
            f"({self.options.max_pack_tokens}) or the longest document ({self._longest(choices)} tokens)"
        )

    @staticmethod
    def _longest(choices: tuple[ReplicaChoice, ...]) -> int:
        return max(int(choice.candidate.forward.stop.max(initial=0)) for choice in choices)


def _slowest_stage(pack_s: np.ndarray) -> np.ndarray:
    return pack_s.max(axis=1) if len(pack_s) else np.zeros(0)


def _rows(seconds: np.ndarray) -> tuple[tuple[float, ...], ...]:
    return cast("tuple[tuple[float, ...], ...]", tuple(map(tuple, seconds.tolist())))
