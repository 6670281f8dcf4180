"""`PlanOptions`: what a user may ask of the planners; no option changes what is trained."""

from typing import Literal

from evenload.errors import ConfigError
from evenload.types.backend import Backend
from evenload.types.base import Frozen

PolicyOption = Literal["replay", "recompute", "offload", "choose"]


class PlanOptions(Frozen):
    """Limits and search space of planning.

    Args:
        max_pack_tokens: most tokens of a pack, padding included (the memory of one micro-batch and the window of
            `padded` and `best_fit`); None = no limit (`evenload train` takes `data.max_document_tokens` then).
        min_slice_tokens: cut pieces are not shorter (a document's rest may be).
        candidates: how many pack counts are tried, `i·pp` with i growing by powers of two.
        cuts: `slimpack` cuts backward packs on their own ("asymmetric"), as the forward packs reversed
            ("symmetric"), or tries both and keeps the faster ("choose").
        schedule: `slimpack` runs the static PackFlow word, the memory-capped list schedule, or the faster.
        max_imbalance: `slimpack` prefers cuts whose max/mean pack time is within this, forward and backward;
            cuts beyond it are used only where no other fits memory.
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
        release: which of the documents that wait `wlb` trains: as many as leave the step balanced ("balance"), or
            one for every micro-batch whenever a queue holds so many ("queues", as WLB's Algorithm 1).
        outlier_queues: most queues of `wlb` with release "queues".
        outlier_lengths: `wlb`'s thresholds, ascending; documents below the first never wait. None = tuned on the
            lengths of the first batches for "queues", no threshold for "balance".
        micro_batches: of a replica and step under `wlb` and `balanced`; None = the least multiple of pp that holds a
            batch, or more where that is faster. Fewer come where there are fewer documents, more where the token
            limit asks for more.
        solver_time_limit_s: of `fixed_exact`, for one step.
        split_backward: `auto` may run backwards as two actions, weight gradients later (zero bubble).
        max_candidates: schedules `auto` simulates beyond `slimpack`'s in a step, over all replicas, for every set of
            activation policies that comes close.
        time_budget_s: `auto` ends its search by the clock too; None = never, because plans then depend on the machine.
        backend: "native", or "python" for the readable twins.

    Raises:
        ConfigError: a limit that nothing can satisfy.
    """

    max_pack_tokens: int | None = None
    min_slice_tokens: int = 1
    candidates: int = 6
    cuts: Literal["asymmetric", "symmetric", "choose"] = "choose"
    schedule: Literal["word", "list", "choose"] = "choose"
    max_imbalance: float = 1.05
    policy: PolicyOption = "choose"
    dp_merge: bool | None = None
    dp_merge_threshold: float = 0.4
    cp_sharding: Literal["per_sequence", "per_document", "adaptive", "mixed"] = "mixed"
    window: int = 1
    max_delay_steps: int = 8
    release: Literal["balance", "queues"] = "balance"
    outlier_queues: int = 2
    outlier_lengths: tuple[int, ...] | None = None
    micro_batches: int | None = None
    solver_time_limit_s: float = 10.0
    split_backward: bool = True
    max_candidates: int = 64
    time_budget_s: float | None = None
    backend: Backend = "native"

    def __post_init__(self) -> None:
        positive = (
            *("max_pack_tokens", "min_slice_tokens", "candidates"),
            *("window", "max_delay_steps", "outlier_queues", "micro_batches", "max_candidates"),
        )
        for field in positive:
            value = getattr(self, field)
            if value is not None and value < 1:
                raise ConfigError(f"plan options: {field} is {value}, must be at least 1")
        if self.max_pack_tokens is not None and self.min_slice_tokens > self.max_pack_tokens:
            raise ConfigError(
                f"plan options: min_slice_tokens {self.min_slice_tokens} is above "
                f"max_pack_tokens {self.max_pack_tokens}"
            )
        if self.time_budget_s is not None and not self.time_budget_s > 0:
            raise ConfigError(f"plan options: time_budget_s is {self.time_budget_s}, must be above 0")
        if not self.solver_time_limit_s > 0:
            raise ConfigError(f"plan options: solver_time_limit_s is {self.solver_time_limit_s}, must be above 0")
        lengths = self.outlier_lengths or ()
        if any(length < 1 for length in lengths) or sorted(set(lengths)) != list(lengths):
            raise ConfigError(f"plan options: outlier_lengths {list(lengths)} must ascend and be at least 1")
        if not self.dp_merge_threshold > 0:
            raise ConfigError(f"plan options: dp_merge_threshold is {self.dp_merge_threshold}, must be above 0")
        if not self.max_imbalance >= 1:
            raise ConfigError(f"plan options: max_imbalance is {self.max_imbalance}, must be at least 1")
