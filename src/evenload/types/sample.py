"""`Sample`: what the model wrote on from a prompt."""

from evenload.types.base import Frozen


class Sample(Frozen):
    """After a step, as rows of metrics call it; `text` without the prompt."""

    step: int
    prompt: str
    text: str
