"""Define `StepPlan`: packs, schedules and predictions of one optimizer step, the only planning object that is sent to
other processes; and `Schedule`, the order in which every pipeline rank runs its packs."""

import hashlib
import re
from collections.abc import Iterable
from typing import Literal

import msgspec

from evenload.errors import InvalidPlanError
from evenload.types.base import Frozen
from evenload.types.document import Document, MicroPack, PackPlan, ReplicaBlock
from evenload.types.layout import ParallelLayout

ActionKind = Literal["F", "I", "W", "B"]
_ACTION = re.compile(r"(\d+)([FIWB])(\d+)")


class Action(Frozen, gc=False):  # holds numbers and a name only; see types/document.py
    """One computation: kinds as in PyTorch's schedules (F forward, B full backward, I input gradient,
    W weight gradient), `stage` the virtual stage, `pack` the forward or backward pack index."""

    kind: ActionKind
    stage: int
    pack: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.pack}"


def parse_action(text: str) -> Action:
    """Read what `str(action)` gives: `2F0` is the forward of pack 0 on stage 2."""
    match = _ACTION.fullmatch(text)
    if match is None:
        raise InvalidPlanError(f"'{text}' is not an action such as 2F0 (stage, one of F I W B, pack)")
    return Action(kind=match[2], stage=int(match[1]), pack=int(match[3]))  # type: ignore[arg-type]


def completing_actions(actions: Iterable[tuple[str, int]], num_before_sums: int = 0) -> dict[int, tuple[int, ...]]:
    """Map places among one rank's actions, as (kind, stage), to the stages whose weight gradients are complete when
    they end: with the last action that is no forward, stage by stage; where a rank has several stages and W's, all with
    the last of them, because replicas may complete them in another order, which transfers must not have. A stage that
    is complete within the first `num_before_sums` actions waits for the last of those."""
    last: dict[int, int] = {}
    has_weights = False
    for at, (kind, stage) in enumerate(actions):
        if kind != "F":
            last[stage] = at
            has_weights |= kind == "W"
    if has_weights and len(last) > 1:
        last = dict.fromkeys(last, max(last.values()))
    stages: dict[int, tuple[int, ...]] = {}
    for stage, at in sorted(last.items()):
        at = max(at, num_before_sums - 1)
        stages[at] = (*stages.get(at, ()), stage)
    return stages


class Schedule(Frozen):
    """Per pipeline rank the actions in order."""

    ranks: tuple[tuple[Action, ...], ...]

    def grid(self) -> str:
        """Return one line for each rank, for messages and debugging."""
        return "\n".join(f"rank {rank}: " + " ".join(map(str, row)) for rank, row in enumerate(self.ranks))


DEFERRED = "deferred"
"""Reason in `LeftOut` of a document that comes in a later step."""


class PackTimes(Frozen):
    """Predicted seconds of one replica's packs, enough to re-simulate its schedule: by pack and virtual stage; p2p by
    pack, of one transfer between neighbouring stages; of I and W, whose sum is `backward_s` to rounding, where the
    schedule splits backwards, else empty."""

    forward_s: tuple[tuple[float, ...], ...]
    backward_s: tuple[tuple[float, ...], ...]
    p2p_forward_s: tuple[float, ...]
    p2p_backward_s: tuple[float, ...]
    input_s: tuple[tuple[float, ...], ...] = ()
    weight_s: tuple[tuple[float, ...], ...] = ()


class Prediction(Frozen):
    """What the simulator expects of the step.

    Args:
        step_time_s: slowest replica plus what of the gradient reduction nothing hides, the optimizer, the gather of
            weights, and the switch of layout before the step where there is one.
        per_replica_s: pipeline makespan of every replica.
        peak_memory_bytes: of the fullest rank, over time.
        reduction_s: seconds in which gradients are summed over replicas, mean over pipeline ranks.
        reduction_hidden_s: of these, while packs are computed.
        gather_s: seconds in which updated weights are gathered.
        gather_hidden_s: of these, those in which no forward of the step after waits for them.
        peak_host_bytes_per_node: offloaded activations and optimizer state in host memory, of the fullest node
            (`cost.memory`).
    """

    step_time_s: float
    per_replica_s: tuple[float, ...]
    peak_memory_bytes: int
    peak_host_bytes_per_node: int = 0
    reduction_s: float = 0.0
    reduction_hidden_s: float = 0.0
    gather_s: float = 0.0
    gather_hidden_s: float = 0.0


class LeftOut(Frozen):
    """A document of the global batch that this step does not train, and why: `DEFERRED`, or why it was dropped."""

    doc_id: int
    num_tokens: int
    reason: str


class StepPlan(Frozen):
    """One optimizer step.

    Args:
        documents: all documents trained in this step.
        num_label_tokens: of the whole global batch: the denominator of the loss on every rank.
        pack_plans, schedules, times: one entry per data-parallel rank.
        mean_token_delay_steps: by how many steps a trained token is later than its global batch, on average.
        is_cut_short: the search for the plan ended early, because it took as long as the step (`auto.planning_share`).
        digest: of everything that decides execution; see `plan_digest`.
    """

    step: int
    strategy: str
    layout: ParallelLayout
    documents: tuple[Document, ...]
    num_label_tokens: int
    pack_plans: tuple[PackPlan, ...]
    schedules: tuple[Schedule, ...]
    times: tuple[PackTimes, ...]
    predicted: Prediction
    left_out: tuple[LeftOut, ...] = ()
    mean_token_delay_steps: float = 0.0
    is_cut_short: bool = False
    digest: str = ""

    @property
    def first_forward_s(self) -> float:
        """Predicted seconds until a forward has run through all stages, and so has read all weights."""
        return min((sum(one.forward_s[0]) for one in self.times if one.forward_s), default=0.0)


def plan_digest(plan: StepPlan) -> str:
    """Hash what decides execution (not predictions); equal on every rank that got the same plan."""
    executed = (plan.step, plan.layout, plan.documents, plan.num_label_tokens, plan.pack_plans, plan.schedules)
    return hashlib.sha256(msgspec.msgpack.encode(executed)).hexdigest()[:16]


def seal(plan: StepPlan) -> StepPlan:
    """Return the plan with its digest filled in."""
    return msgspec.structs.replace(plan, digest=plan_digest(plan))


def encode_plan(plan: StepPlan) -> bytes:
    """Encode a plan for another process."""
    return msgspec.msgpack.encode(plan)


def decode_plan(data: bytes) -> StepPlan:
    """Decode what `encode_plan` gives; `InvalidPlanError` where the digest does not match the content."""
    plan = msgspec.msgpack.decode(data, type=StepPlan)
    if plan.digest != plan_digest(plan):
        raise InvalidPlanError(f"plan of step {plan.step} says digest {plan.digest}, content gives {plan_digest(plan)}")
    return plan


def block_of(plan: StepPlan, dp_rank: int, pack: MicroPack) -> ReplicaBlock:
    """Return the replicas that share a pack of this replica."""
    size = max((max(1, piece.cp // plan.layout.cp) for piece in pack.slices), default=1)
    return ReplicaBlock(dp_rank // size * size, size)
