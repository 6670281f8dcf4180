"""Plan steps: `StepPlanner` turns a global batch into one sealed `StepPlan`, the only planning call of the runtime.

The same documents, options and coefficients give the same plan, bit for bit, on every rank. Planning works on numpy
columns; objects are made once, for the chosen candidates.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from evenload.cost.coefficients import CostCoefficients
from evenload.cost.layer_counts import POLICIES, REPLAY
from evenload.cost.memory import HostMemory, Unlimited, fullest_node_bytes, offloaded_state_bytes, peak_host_bytes
from evenload.cost.pack_cost import PackCosts
from evenload.errors import DataError, InfeasiblePlanError
from evenload.planning.activation_policy import plan_within_host, policies_in_order
from evenload.planning.cp_sharding import repriced_choices
from evenload.planning.deferral import DelayState, arrivals_of, mean_token_delay_steps, state_after, trained_documents
from evenload.planning.problem import PlanOptions, ReplicaChoice, StepProblem, imbalance, with_times_that_run
from evenload.planning.strategies.registry import STRATEGIES, strategy_named
from evenload.planning.tree_runs import tree_cuts
from evenload.schedule.step_collectives import step_end
from evenload.stepplan.validate import why_not_in_backward
from evenload.types.columns import SliceColumns
from evenload.types.document import ActivationPolicy, Document, PackPlan
from evenload.types.layout import ParallelLayout
from evenload.types.model import ModelSpec
from evenload.types.plan import DEFERRED, LeftOut, Prediction, StepPlan, seal
from evenload.types.text import format_bytes
from evenload.types.tree_columns import TreeColumns

CUT_SHORT_NOTE = "search cut short: it took as long as the step it plans (auto.planning_share)"


@dataclass(frozen=True, eq=False)
class Proposal:
    """Hold a plan with its figures, within memory or not.

    Args:
        plan: sealed.
        choices: per replica the chosen columns, tasks, actions and simulation.
        why: the plan does not fit memory; "" when it does.
        bubble_fraction: share of all ranks' step time in which no pack is computed.
        imbalance_forward, imbalance_backward: max/mean pack time on the slowest stage, of the worst set of ranks.
        imbalance_dp: max/mean makespan over replicas.
        max_pack_tokens: of the largest pack, padding included; cap_violations: packs above the options' token limit.
        switch_s: of a change of layout before the step, part of its step time.
        effort_s: what planning took by the price of trials (`plan.problem.Effort`).
        state: for the next step; None where the step was planned without one.
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
    costs: PackCosts
    state: DelayState | None = None
    switch_s: float = 0.0
    effort_s: float = 0.0

    @property
    def feasible(self) -> bool:
        """Check whether the plan fits memory."""
        return not self.why

    @property
    def note(self) -> str:
        """Return what a reader must know about how the plan was found; "" = nothing."""
        own = next((choice.note for choice in self.choices if choice.note), "")
        return "; ".join(filter(None, (own, CUT_SHORT_NOTE if self.plan.is_cut_short else "")))

    def require_feasible(self) -> StepPlan:
        """Return the plan; raise `InfeasiblePlanError` where it does not fit memory."""
        if not self.feasible:
            raise InfeasiblePlanError(f"step {self.plan.step}: {self.why}")
        return self.plan


class StepRequest(NamedTuple):
    """Hold the arguments of `StepPlanner.propose`."""

    step: int
    documents: tuple[Document, ...]
    strategy: str
    left_out: tuple[LeftOut, ...] = ()
    state: DelayState | None = None
    is_last: bool = False


class StepPlanner:
    """Plan steps of one run.

    Args:
        memory_cap_bytes: usable bytes of one device; None = not limited.
        options: limits and search space.
        host: what nodes offer to offloaded activations (`cost.memory.host_memory(cluster)`); "unlimited" = no
            limit, nodes as the coefficients say.
        waits_at_each: replicas wait for each other at every micro-batch, as some engines do.

    Raises:
        ConfigError: the layout is not supported yet or belongs to another model.
    """

    def __init__(
        self,
        model: ModelSpec,
        coefficients: CostCoefficients,
        layout: ParallelLayout,
        memory_cap_bytes: int | None,
        options: PlanOptions | None = None,
        *,
        host: HostMemory | Unlimited,
        waits_at_each: bool = False,
    ) -> None:
        self.options = options or PlanOptions()
        # Searches price shared packs per document whatever the rule: what rules choose from is known as plans run.
        self.costs = PackCosts(model, coefficients, layout)
        self.layout = layout
        self.memory_cap_bytes = memory_cap_bytes
        self.host = host if isinstance(host, HostMemory) else HostMemory(coefficients.devices_per_node, None)
        self.waits_at_each = waits_at_each

    def plan(
        self, step: int, documents: tuple[Document, ...], strategy: str, left_out: tuple[LeftOut, ...] = ()
    ) -> StepPlan:
        """Plan a step alone that fits memory; as `propose`, and an `InfeasiblePlanError` where none fits memory."""
        return self.propose(step, documents, strategy, left_out).require_feasible()

    def propose(
        self,
        step: int,
        documents: tuple[Document, ...],
        strategy: str,
        left_out: tuple[LeftOut, ...] = (),
        *,
        state: DelayState | None = None,
        is_last: bool = False,
    ) -> Proposal:
        """Plan a step, with its figures, also where the plan exceeds memory.

        Args:
            documents: the global batch in arrival order; ids are unique.
            strategy: a name of `plan.strategies`.
            left_out: documents of the batch that are not trained, recorded in the plan.
            state: of the step before (`DelayState()` at first): then `documents` are the new ones and all that wait,
                and a delaying strategy may defer some. None = the step stands alone.
            is_last: the data has ended: nothing may be deferred.

        Raises:
            ConfigError: unknown strategy or unusable options.
            DataError: a repeated document id, a document that the strategy cannot fit into a pack, or one that waits
                and is not among the documents.
            InfeasiblePlanError: every candidate exceeds the token limit.
        """
        return self.answer(StepRequest(step, documents, strategy, left_out, state, is_last))

    def with_options(self, options: PlanOptions) -> "StepPlanner":
        """Return a planner with other options, otherwise alike."""
        of_run = self.costs.model, self.costs.coefficients, self.layout, self.memory_cap_bytes
        return StepPlanner(*of_run, options, host=self.host, waits_at_each=self.waits_at_each)

    def answer(self, request: StepRequest) -> Proposal:
        """Plan as `propose`."""
        step, documents, state = request.step, request.documents, request.state
        chosen = strategy_named(request.strategy)
        first = self._problem(step, documents)
        arrivals = None if state is None else arrivals_of(step, first.doc_ids, state, request.is_last)
        can_offload = self.costs.coefficients.host_link is not None
        policies = policies_in_order(first.num_tokens, self.options.policy, can_offload=can_offload)
        problems = [first if policy is None else replace(first, policy=policy) for policy in policies]
        others = tuple(STRATEGIES.values()) if chosen.tries_others else ()
        problem, answer, beyond_host = plan_within_host(
            problems, lambda tried: chosen.plan_step(tried, arrivals, others), self._host_bytes, self.host
        )
        age_steps = np.zeros(len(documents), np.int64) if arrivals is None else arrivals.age_steps()
        choices = tuple(
            replace(choice, candidate=with_times_that_run(choice.candidate, self.layout.tp))
            for choice in repriced_choices(problem, answer.choices)
        )
        plan = self._step_plan(request, problem, choices, age_steps)
        after = None if arrivals is None else state_after(arrivals, problem.doc_ids, problem.num_tokens, answer)
        return replace(self._proposal(plan, choices, after, beyond_host), effort_s=first.effort.seconds)

    def _host_bytes(self, choices: Sequence[ReplicaChoice]) -> int:
        result = [choice.candidate for choice in choices]
        state_bytes = offloaded_state_bytes(self.costs.model, self.layout)
        peaks = [state_bytes + peak_host_bytes(self.costs.model, self.layout, one.packs, one.actions) for one in result]
        return fullest_node_bytes(self.layout, peaks, self.host.devices_per_node)

    def _problem(self, step: int, documents: tuple[Document, ...]) -> StepProblem:
        doc_ids = np.array([document.doc_id for document in documents], dtype=np.int64)
        num_tokens = np.array([document.num_tokens for document in documents], dtype=np.int64)
        values, counts = np.unique(doc_ids, return_counts=True)
        if len(values) != len(doc_ids):
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
        trees = TreeColumns.of(documents)
        self.costs.require_trees(trees)
        limit = self.memory_cap_bytes
        cap = None if limit is None else np.full(self.layout.pipeline_ranks, limit, dtype=np.int64)
        host_bytes = None
        if self.host.limit_bytes is not None:
            state_bytes = int(offloaded_state_bytes(self.costs.model, self.layout).max())
            host_bytes = max(0, self.host.limit_bytes // self.host.devices_per_node - state_bytes)
        return StepProblem(
            doc_ids,
            num_tokens,
            self.costs,
            cap,
            self.options,
            host_device_bytes=host_bytes,
            waits_at_each=self.waits_at_each,
            trees=trees,
        )

    def _step_plan(
        self, request: StepRequest, problem: StepProblem, choices: tuple[ReplicaChoice, ...], age_steps: np.ndarray
    ) -> StepPlan:
        documents, left_out = request.documents, request.left_out
        pack_plans, schedules, times = [], [], []
        for dp_rank, choice in enumerate(choices):
            result, packs, tasks = choice.candidate, choice.candidate.packs, choice.candidate.tasks
            doc_ids = problem.doc_ids[choice.documents]
            slices = packs.forward.pack_slices(doc_ids)
            backward_slices = slices if packs.backward is packs.forward else packs.backward.pack_slices(doc_ids)
            forward_s, backward_s = (s.max(axis=1, initial=0.0) for s in (tasks.forward_s, tasks.backward_s))
            pack_plans.append(
                PackPlan(
                    dp_rank=dp_rank,
                    forward=packs.forward.packs("forward", slices, forward_s, result.shardings or ()),
                    backward=packs.backward.packs("backward", backward_slices, backward_s),
                    policies=_policies(doc_ids, packs.policy),
                )
            )
            schedules.append(result.actions.to_schedule())
            times.append(result.pack_times())
        per_replica_s = tuple(float(choice.candidate.makespan_s) for choice in choices)
        end = step_end(self.costs, [choice.candidate for choice in choices])
        trained = trained_documents(choices)
        if len(trained) < len(documents):
            chosen = set(trained.tolist())
            left_out += tuple(
                LeftOut(doc_id=document.doc_id, num_tokens=document.num_tokens, reason=DEFERRED)
                for index, document in enumerate(documents)
                if index not in chosen
            )
            documents = tuple(documents[index] for index in trained.tolist())
        return seal(
            StepPlan(
                step=request.step,
                strategy=request.strategy,
                layout=self.layout,
                documents=documents,
                num_label_tokens=sum(document.num_label_tokens for document in documents),
                pack_plans=tuple(pack_plans),
                schedules=tuple(schedules),
                times=tuple(times),
                predicted=Prediction(
                    step_time_s=end.end_s,
                    per_replica_s=per_replica_s,
                    peak_memory_bytes=max(int(c.candidate.simulation.peak_bytes.max()) for c in choices),
                    peak_host_bytes_per_node=self._host_bytes(choices),
                    **end.collective_seconds(),
                ),
                left_out=left_out,
                mean_token_delay_steps=mean_token_delay_steps(age_steps[trained], problem.num_tokens[trained]),
                is_cut_short=problem.effort.is_cut_short,
            )
        )

    def _proposal(
        self, plan: StepPlan, choices: tuple[ReplicaChoice, ...], state: DelayState | None, beyond_host: str
    ) -> Proposal:
        result = [choice.candidate for choice in choices]
        used = [one for one in result if one.packs.forward.num_packs]
        busy_s = sum(float(one.tasks.forward_s.sum() + one.tasks.backward_s.sum()) for one in result)
        makespan_s = np.array([one.makespan_s for one in result])
        sides = [side for one in result for side in (one.packs.forward, one.packs.backward)]
        tokens = np.concatenate([side.pack_tokens() for side in sides])
        limit = self.options.max_pack_tokens
        return Proposal(
            plan=plan,
            choices=choices,
            why=self._memory_reason(plan, choices, beyond_host),
            bubble_fraction=1.0 - busy_s / (self.layout.dp * self.layout.pipeline_ranks * plan.predicted.step_time_s),
            imbalance_forward=max((_imbalance(one.packs.forward, one.tasks.forward_s) for one in used), default=1.0),
            imbalance_backward=max((_imbalance(one.packs.backward, one.tasks.backward_s) for one in used), default=1.0),
            imbalance_dp=float(makespan_s.max() / makespan_s.mean()) if makespan_s.any() else 1.0,
            max_pack_tokens=int(tokens.max(initial=0)),
            cap_violations=0 if limit is None else int((tokens > limit).sum()),
            costs=self.costs,
            state=state,
        )

    def _memory_reason(self, plan: StepPlan, choices: tuple[ReplicaChoice, ...], beyond_host: str) -> str:
        if self.costs.model.unit_gradients and (why := why_not_in_backward(plan)):
            return f"strategy {plan.strategy}: {why}"
        host_bytes, limit_bytes = plan.predicted.peak_host_bytes_per_node, self.host.limit_bytes
        if limit_bytes is not None and host_bytes > limit_bytes:
            return (
                f"strategy {plan.strategy}: {beyond_host}; recompute instead (plan.options.policy), spread documents "
                "over more nodes (dp, cp), or lower the longest document"
            )
        if self.memory_cap_bytes is None or not any(choice.candidate.excess_bytes for choice in choices):
            return ""
        dp_rank = max(range(len(choices)), key=lambda rank: choices[rank].candidate.excess_bytes)
        peak = choices[dp_rank].candidate.simulation.peak_bytes
        rank = int(peak.argmax())
        missing_bytes = int(peak[rank]) - self.memory_cap_bytes
        return (
            f"strategy {plan.strategy} needs {format_bytes(peak[rank])} on pipeline rank {rank} of replica {dp_rank}, "
            f"the device offers {format_bytes(self.memory_cap_bytes)} ({format_bytes(missing_bytes)} less); raise pp, "
            f"or lower max_pack_tokens ({self.options.max_pack_tokens}) or the longest document "
            f"({max(int(choice.candidate.packs.forward.stop.max(initial=0)) for choice in choices)} tokens)"
            + (f"; {beyond_host}" if beyond_host else "")
        )


def _policies(doc_ids: np.ndarray, policy: np.ndarray | None) -> dict[int, ActivationPolicy]:
    if policy is None:
        return {}
    coded = zip(doc_ids.tolist(), policy.tolist(), strict=True)
    return {doc_id: POLICIES[code] for doc_id, code in coded if code != REPLAY}


def _imbalance(packs: SliceColumns, pack_s: np.ndarray) -> float:
    """Return max/mean pack time of the worst set of ranks: packs that a group of replicas shares are a set."""
    ranks = packs.cp[packs.pack_offset[:-1]]
    return max(imbalance(pack_s[ranks == count]) for count in np.unique(ranks))


@dataclass(frozen=True, eq=False)
class RunPlanner:
    """Plan the steps of a run (`feed.step_maker.Planner`) by one strategy in one layout; without `may_delay` every
    step trains its whole batch, whatever the strategy, without `may_cut` trees stay whole."""

    planner: StepPlanner
    strategy: str
    may_delay: bool = True
    may_cut: bool = True
    known_steps = 1
    state_type = DelayState

    def cuts(self, documents: Sequence[Document]) -> dict[int, list[int]]:
        """Return where trees are cut (`planning.tree_runs`); nowhere where documents may wait, which parts cannot."""
        stays = not self.may_cut or strategy_named(self.strategy).delay is not None
        return {} if stays or not any(one.segments for one in documents) else tree_cuts(documents, self.planner.costs)

    def plan_step(
        self,
        step: int,
        documents: tuple[Document, ...],
        state: DelayState,
        *,
        coming: Sequence[tuple[Document, ...]] = (),
        is_last: bool = False,
    ) -> tuple[StepPlan, DelayState, None]:
        """Plan a step; the state after it, and no decision about the layout. Raises as `StepPlanner.plan`."""
        delay = state if self.may_delay else None
        proposal = self.planner.propose(step, documents, self.strategy, state=delay, is_last=is_last)
        return proposal.require_feasible(), proposal.state or DelayState(), None
