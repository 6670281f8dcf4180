"""OLMo. OLMo 2 norms behind blocks only, and all query heads together."""

from evenload.types.architectures.architecture import Architecture

FAMILY = (
    Architecture(model_type="olmo"),
    Architecture(
        model_type="olmo2",
        classes="Olmo2",
        post_norm=True,
        norm_first=False,
        uncut="norms all query heads together, which lie on different ranks",
    ),
    Architecture(model_type="olmo3", post_norm=True, full_every=4),
    Architecture(model_type="olmoe"),
)
