"""`SamplesConfig`: the section `[samples]`. Needs no torch."""

from evenload.errors import ConfigError
from evenload.types.base import Frozen


class SamplesConfig(Frozen):
    """What the model writes on from some prompts while it trains, greedily: the likeliest token every time. In layouts
    in which one process holds the whole model (`pp`, `virtual` and `tp` 1).

    Args:
        prompts: texts, encoded as they are, without a chat template.
        every_steps: after every so many steps.
        max_new_tokens: at most; a text ends before with the end-of-document token.
    """

    prompts: tuple[str, ...]
    every_steps: int
    max_new_tokens: int = 64

    def __post_init__(self) -> None:
        if not self.prompts or not all(self.prompts):
            raise ConfigError(f"samples.prompts is {list(self.prompts)}; give at least one text, and no empty one")
        for field in ("every_steps", "max_new_tokens"):
            if getattr(self, field) < 1:
                raise ConfigError(f"samples.{field} is {getattr(self, field)}, must be at least 1")
