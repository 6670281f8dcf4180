"""`PlanOptions`: what a user may ask of the planners; no option changes what is trained."""

from typing import Literal

from evenload.errors import ConfigError
from evenload.types.backend import Backend
from evenload.types.base import Frozen


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
    backend: Backend = "native"

    def __post_init__(self) -> None:
        for field in ("max_pack_tokens", "min_slice_tokens", "candidates"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise ConfigError(f"plan options: {field} is {value}, must be at least 1")
        if self.max_pack_tokens is not None and self.min_slice_tokens > self.max_pack_tokens:
            raise ConfigError(
                f"plan options: min_slice_tokens {self.min_slice_tokens} is above "
                f"max_pack_tokens {self.max_pack_tokens}"
            )
        if not self.max_imbalance >= 1:
            raise ConfigError(f"plan options: max_imbalance is {self.max_imbalance}, must be at least 1")
