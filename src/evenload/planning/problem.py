"""Define what every strategy maps: `StepProblem` in, a `ReplicaChoice` with a `Candidate` for every replica out.

    ReplicaPacks ─► PipelineTasks (seconds, bytes, dependencies) ─► ActionColumns ─► Simulation ─► score

A candidate within memory beats any beyond it; within memory the shorter makespan wins, beyond it the smaller excess.

`PlanOptions` is what a user may set; no option changes what is trained. What one strategy alone reads is a struct in
that strategy's file, and a table of its name in a configuration: `plan.options.wlb.release`.
"""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from evenload.cost.memory import ReplicaPacks
from evenload.cost.pack_cost import PackCosts
from evenload.cost.pack_pricing import pipeline_tasks
from evenload.errors import ConfigError, DataError, EvenloadError
from evenload.schedule.registry import SCHEDULES
from evenload.schedule.schedule_rule import ScheduleRule
from evenload.schedule.simulate import simulate
from evenload.schedule.step_collectives import SimulatedReplica
from evenload.types.base import Frozen, require_at_least_one
from evenload.types.columns import SliceColumns
from evenload.types.document import PackSharding
from evenload.types.layout import ParallelLayout
from evenload.types.pipeline import ActionColumns, PipelineTasks
from evenload.types.plan import PackTimes
from evenload.types.timeline import KINDS
from evenload.types.tree_columns import NO_TREES, TreeColumns

PolicyOption = Literal["replay", "recompute", "offload", "choose"]
CHOOSE = "choose"  # The schedule that suits a strategy: 1F1B of whole documents, the fastest found where it searches


class StrategyOptions(Frozen, tag_field="strategy"):
    """Hold what one strategy alone reads; subclasses are tagged with its name."""


Own = TypeVar("Own", bound=StrategyOptions)


class PlanOptions(Frozen):
    """Set the limits and the search space of planning that strategies share.

    Args:
        max_pack_tokens: most tokens of a pack, padding included (the memory of one micro-batch and the window of
            `padded` and `best_fit`); None = no limit (`evenload train` takes `data.max_document_tokens` then).
        min_slice_tokens: cut pieces are not shorter (a document's rest may be).
        candidates: how many pack counts are tried, `i·pp` with i growing by powers of two.
        schedule: how pipeline ranks order their packs: "1f1b", "interleaved", "gpipe", "zb_h1", "static" (PackFlow),
            "list", "list_split", or one that a package adds. "choose" = 1F1B under strategies of whole documents, the
            fastest found under `slimpack` and `auto`.
        policy: what documents keep between forward and backward: everything ("replay"), little and compute it again
            ("recompute"), everything in host memory ("offload"), or the first where it fits memory and else the
            fastest mixture that does ("choose").
        dp_merge: `slimpack` and `auto` let aligned groups of replicas share documents too long for one of them, where
            that is faster. Default: on in `evenload train` and `evenload plan` where replicas can share, off elsewhere.
        dp_merge_threshold: a group is as large as it takes for a document to cost each member at most this share of
            the mean replica's work; less where that leaves replicas uneven.
        cp_sharding: how context-parallel ranks share a pack (`plan.cp_sharding`); `skrull` decides for itself.
        window: `fixed_greedy` and `fixed_exact` pack over about so many global batches (1 = each step alone).
        max_delay_steps: strategies that move documents between steps train each within so many steps.
        micro_batches: of a replica and step under `wlb` and `balanced`; None = the least multiple of pp that holds a
            batch, or more where that is faster. Fewer come where there are fewer documents, more where the token
            limit asks for more.
        strategies: own options of strategies, at most one struct of each.

    Raises:
        ConfigError: a limit that nothing can satisfy.
    """

    max_pack_tokens: int | None = None
    min_slice_tokens: int = 1
    candidates: int = 6
    schedule: str = CHOOSE
    policy: PolicyOption = "choose"
    dp_merge: bool | None = None
    dp_merge_threshold: float = 0.4
    cp_sharding: Literal["per_sequence", "per_document", "adaptive", "mixed"] = "mixed"
    window: int = 1
    max_delay_steps: int = 8
    micro_batches: int | None = None
    strategies: tuple[StrategyOptions, ...] = ()

    def __post_init__(self) -> None:
        counts = ("max_pack_tokens", "min_slice_tokens", "candidates", "window", "max_delay_steps", "micro_batches")
        require_at_least_one("plan options: ", self, *counts)
        if self.schedule != CHOOSE:
            SCHEDULES.named(self.schedule)
        if self.max_pack_tokens is not None and self.min_slice_tokens > self.max_pack_tokens:
            raise ConfigError(
                f"plan options: min_slice_tokens {self.min_slice_tokens} is above max_pack_tokens "
                f"{self.max_pack_tokens}"
            )
        if not self.dp_merge_threshold > 0:
            raise ConfigError(f"plan options: dp_merge_threshold is {self.dp_merge_threshold}, must be above 0")

    def rule(self, usual: ScheduleRule) -> ScheduleRule:
        """Return the configured schedule; `usual` where it is to be chosen."""
        return usual if self.schedule == CHOOSE else SCHEDULES.named(self.schedule)

    def own(self, kind: type[Own]) -> Own:
        """Return the options of one strategy, its defaults where nothing is set."""
        return next((one for one in self.strategies if isinstance(one, kind)), None) or kind()

    def with_own(self, own: StrategyOptions) -> "PlanOptions":
        """Return the same with other options of one strategy."""
        others = (one for one in self.strategies if type(one) is not type(own))
        return msgspec.structs.replace(self, strategies=(*others, own))


@dataclass(frozen=True, eq=False)
class Candidate(SimulatedReplica):
    """Hold one way to run a replica's documents.

    Args:
        label: how it was made, for reports: cuts, pack count, schedule.
        excess_bytes: peak above the memory limit on the worst rank; 0 = fits.
        schedule: name of the rule that ordered the packs.
        shardings: how ranks share each forward pack (`MicroPack.sharding`), whose slowest rank's seconds `tasks` has;
            None = not decided yet, and seconds are means over ranks (`plan.cp_sharding`).
    """

    label: str = ""
    excess_bytes: int = 0
    schedule: str = ""
    shardings: tuple[PackSharding, ...] | None = None

    @property
    def makespan_s(self) -> float:
        """Return the seconds from the first forward to the last backward."""
        return self.simulation.makespan_s

    def score(self) -> tuple[int, float]:
        """Return bytes beyond memory and seconds; smaller is better."""
        return self.excess_bytes, self.makespan_s

    def pack_times(self) -> PackTimes:
        """Return the seconds that a plan records."""
        tasks, split = self.tasks, self.tasks.split
        return PackTimes(
            forward_s=_rows(tasks.forward_s),
            backward_s=_rows(tasks.backward_s),
            p2p_forward_s=tuple(tasks.p2p_forward_s.tolist()),
            p2p_backward_s=tuple(tasks.p2p_backward_s.tolist()),
            input_s=_rows(split.input_s) if split else (),
            weight_s=_rows(split.weight_s) if split else (),
        )


def with_times_that_run(result: Candidate, tp: int) -> Candidate:
    """Let I and W of every backward add up to the whole in a candidate's times, as plans promise: under tensor
    parallelism parts that run take longer than the whole (`cost.pack_pricing`), and on each stage the seconds of the
    way that does not run follow those of the way that does."""
    tasks, split = result.tasks, result.tasks.split
    if tp == 1 or split is None:
        return result
    weights = result.actions.kind == KINDS.index("W")
    is_split = np.zeros(tasks.backward_s.shape, bool)
    is_split[result.actions.pack[weights], result.actions.stage[weights]] = True
    parts = replace(split, weight_s=np.where(is_split, split.weight_s, tasks.backward_s - split.input_s))
    whole_s = np.where(is_split, split.input_s + split.weight_s, tasks.backward_s)
    return replace(result, tasks=replace(tasks, backward_s=whole_s, split=parts))


def imbalance(pack_s: NDArray[np.float64]) -> float:
    """Return max / mean over packs of the time on their slowest stage (as `types.timeline`); 1 without packs."""
    if not len(pack_s):
        return 1.0
    slowest = pack_s.max(axis=1)
    return float(slowest.max() / slowest.mean()) if slowest.any() else 1.0


def _rows(seconds: NDArray[np.float64]) -> tuple[tuple[float, ...], ...]:
    return cast("tuple[tuple[float, ...], ...]", tuple(map(tuple, seconds.tolist())))


PRICE_OF_TRIAL_S, PRICE_OF_DOCUMENT_S = 5e-5, 1e-6
"""What planning takes for a trial and for every document in it, on two cores: round figures, and so for all machines.
`benchmarks/planning.py` compares them with the clock (`--part price`)."""


class SlowerPlanError(EvenloadError):
    """A plan that cannot beat the one that is known (`Effort.to_beat`)."""


@dataclass(eq=False)
class Effort:
    """Count what planning a step has taken, and end the search where that is too much of a step.

    One thread plans, one step after the other, while earlier ones train, and steps take about as long as each other: no
    step waits for its plan as long as planning takes less than the step that is planned. Its seconds are those of the
    best plan by now. What planning takes is the price of what was tried, not the clock's: the search then ends at the
    same trial on every machine, however loaded, and a resumed run plans as if it had not been stopped.

    Args:
        share: of the predicted step time, what planning may take.
        trials, documents: tried so far, and the documents in all of them.
        is_cut_short: the search ended although more was to be tried.
        to_beat: bytes beyond memory and seconds of a known plan; other strategies stop where they are no better.
    """

    share: float = float("inf")
    trials: int = 0
    documents: int = 0
    is_cut_short: bool = False
    to_beat: tuple[int, float] | None = None

    def add(self, trials: int, documents: int) -> None:
        """Count trials of so many documents each."""
        self.trials += trials
        self.documents += trials * documents

    @property
    def seconds(self) -> float:
        """Return the price of all trials."""
        return PRICE_OF_TRIAL_S * self.trials + PRICE_OF_DOCUMENT_S * self.documents

    def faster(self, choices: Iterable["ReplicaChoice"]) -> tuple["ReplicaChoice", ...]:
        """Collect the choices of a plan; raise `SlowerPlanError` at the first replica that does not beat `to_beat`."""
        result: list[ReplicaChoice] = []
        for choice in choices:
            if self.to_beat is not None and choice.candidate.score() >= self.to_beat:
                raise SlowerPlanError("a better plan is known")
            result.append(choice)
        return tuple(result)

    def may_go_on(self, best: tuple[int, float]) -> bool:
        """Check whether more may be tried, and note where it may not: by bytes beyond memory and seconds of the best
        plan by now. The search for one within memory always goes on."""
        excess_bytes, best_s = best
        is_left = excess_bytes > 0 or self.seconds <= self.share * best_s
        self.is_cut_short |= not is_left
        return is_left


@dataclass(frozen=True, eq=False)
class StepProblem:
    """Hold one global batch to be planned; its costs also carry the model and the layout.

    Args:
        doc_ids, num_tokens: int64[n], in arrival order; of a tree its unique tokens.
        cap_bytes: int64[R], memory of every pipeline rank; None = no limit.
        policy: int8[n], activation policy of every document (`cost.layer_counts.POLICIES`); None = all replay.
        host_device_bytes: of host memory, what each device may offload to; None = not limited.
        waits_at_each: replicas wait for each other at every micro-batch (FSDP, ZeRO-3), and not once a step.
        effort: of planning the step, one for all problems that differ in policy or memory alone.
        trees: ranges of the documents.
    """

    doc_ids: NDArray[np.int64]
    num_tokens: NDArray[np.int64]
    costs: PackCosts
    cap_bytes: NDArray[np.int64] | None
    options: PlanOptions
    policy: NDArray[np.int8] | None = None
    host_device_bytes: int | None = None
    waits_at_each: bool = False
    effort: Effort = field(default_factory=Effort)
    trees: TreeColumns = NO_TREES
    document_s: NDArray[np.float64] = field(init=False)
    # Scores that searches of this problem share, by ranks and documents, then by trial (`plan.candidates`).
    known_scores: dict[tuple[int, bytes], dict[Any, Any]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        document_s = self.costs.document_seconds(self.num_tokens, self.policy, trees=self.trees)
        object.__setattr__(self, "document_s", document_s)

    @property
    def layout(self) -> ParallelLayout:
        """Return the layout of the run."""
        return self.costs.layout

    @functools.cached_property
    def stored_s(self) -> float:
        """Return the forward + backward seconds of all documents where every activation is stored."""
        return float(self.costs.document_seconds(self.num_tokens, None, trees=self.trees).sum())

    @property
    def shares_documents(self) -> bool:
        """Whether replicas may share documents; of a step with trees of shared prefixes they share none."""
        return bool(self.options.dp_merge) and self.costs.model.may_cut_documents and not self.trees.has_any

    def policy_of(self, documents: NDArray[np.int64]) -> NDArray[np.int8] | None:
        """Return the activation policies of some documents; None = all replay."""
        return None if self.policy is None else self.policy[documents]

    def packs_of(
        self, documents: NDArray[np.int64], forward: SliceColumns, backward: SliceColumns | None = None
    ) -> ReplicaPacks:
        """Return packs of these documents, which the columns count; `backward` None = the same packs."""
        backward = forward if backward is None else backward
        policy, trees = self.policy_of(documents), self.trees.taken(documents)
        return ReplicaPacks(forward, backward, self.num_tokens[documents], policy, trees=trees)

    def scheduled(
        self, label: str, packs: ReplicaPacks, rule: ScheduleRule, tasks: PipelineTasks | None = None
    ) -> Candidate:
        """Simulate packs under a schedule, priced already or as it needs them; `ConfigError`: it does not suit them."""
        if tasks is None:
            tasks = pipeline_tasks(self.costs, packs, split=rule.splits_backward)
        return self.ordered(f"{label}, {rule.name}", packs, tasks, rule.actions(tasks, self.cap_bytes), rule.name)

    def ordered(
        self, label: str, packs: ReplicaPacks, tasks: PipelineTasks, actions: ActionColumns, schedule: str
    ) -> Candidate:
        """Simulate priced packs in one order; `schedule` names the rule that made it."""
        simulation = simulate(tasks, actions)
        excess = 0 if self.cap_bytes is None else max(0, int((simulation.peak_bytes - self.cap_bytes).max()))
        return Candidate(packs, tasks, actions, simulation, label, excess, schedule)

    def reordered(self, result: Candidate, actions: ActionColumns, tasks: PipelineTasks | None = None) -> Candidate:
        """Simulate the packs of a candidate in another order, or with other seconds (`tasks`)."""
        tasks = result.tasks if tasks is None else tasks
        other = self.ordered(result.label, result.packs, tasks, actions, result.schedule)
        return replace(other, shardings=result.shardings)

    def window_tokens(self, strategy: str) -> int:
        """Return the pack limit that strategies with fixed windows need; a `ConfigError` where there is none, a
        `DataError` where a document that may not be cut is longer."""
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
    """Hold the chosen candidate of one replica, its documents (int64[k], indices into the problem's arrays, which the
    candidate's `SliceColumns.doc` counts), and what a reader must know about how it was found ("" = nothing)."""

    documents: NDArray[np.int64]
    candidate: Candidate
    note: str = ""


Planner = Callable[[StepProblem], tuple[ReplicaChoice, ...]]  # One global batch in, one choice a replica out
