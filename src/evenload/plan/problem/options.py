"""`PlanOptions`: what a user may ask of the planners; no option changes what is trained.

What several strategies read stands here; what one strategy reads is a struct in that strategy's file, and a table of
its name in a configuration: `plan.options.wlb.release`.
"""

from typing import Literal, TypeVar

import msgspec

from evenload.errors import ConfigError
from evenload.schedule.registry import SCHEDULES
from evenload.schedule.schedule_rule import ScheduleRule
from evenload.types.base import Frozen

PolicyOption = Literal["replay", "recompute", "offload", "choose"]


CHOOSE = "choose"
"""The schedule that suits a strategy: 1F1B of whole documents, the fastest found where it searches."""


class StrategyOptions(Frozen, tag_field="strategy"):
    """What one strategy alone reads; subclasses are tagged with its name."""


Own = TypeVar("Own", bound=StrategyOptions)


class PlanOptions(Frozen):
    """Limits and search space of planning that strategies share.

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
        cp_sharding: how context-parallel ranks share a pack (`plan.sharing.cp_sharding`); `skrull` decides for itself.
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
        positive = (
            *("max_pack_tokens", "min_slice_tokens", "candidates"),
            *("window", "max_delay_steps", "micro_batches"),
        )
        for field in positive:
            value = getattr(self, field)
            if value is not None and value < 1:
                raise ConfigError(f"plan options: {field} is {value}, must be at least 1")
        if self.schedule == "word":
            raise ConfigError("plan options: schedule 'word' is called 'static' now")
        if self.schedule != CHOOSE:
            SCHEDULES.named(self.schedule)
        if self.max_pack_tokens is not None and self.min_slice_tokens > self.max_pack_tokens:
            raise ConfigError(
                f"plan options: min_slice_tokens {self.min_slice_tokens} is above "
                f"max_pack_tokens {self.max_pack_tokens}"
            )
        if not self.dp_merge_threshold > 0:
            raise ConfigError(f"plan options: dp_merge_threshold is {self.dp_merge_threshold}, must be above 0")

    def rule(self, usual: ScheduleRule) -> ScheduleRule:
        """The schedule that was asked for; `usual` where none was."""
        return usual if self.schedule == CHOOSE else SCHEDULES.named(self.schedule)

    def own(self, kind: type[Own]) -> Own:
        """The options of one strategy, the usual ones where nothing is set."""
        return next((one for one in self.strategies if isinstance(one, kind)), None) or kind()

    def with_own(self, own: StrategyOptions) -> "PlanOptions":
        """The same with other options of one strategy."""
        others = (one for one in self.strategies if type(one) is not type(own))
        return msgspec.structs.replace(self, strategies=(*others, own))
