"""Gemma 1 to 3: embeddings times a factor, norms before and behind blocks, caps and windows."""

from evenload.types.architectures.architecture import Architecture

FAMILY = (
    Architecture(model_type="gemma", classes="Gemma", tied=True, plain_norms=False),
    Architecture(
        model_type="gemma2",
        classes="Gemma2",
        plain_norms=False,
        tied=True,
        post_norm=True,
        full_every=2,
        soft_cap_key="attn_logit_softcapping",
    ),
    # Its configuration has the key of the soft cap, too, but transformers' model does not read it.
    Architecture(
        model_type="gemma3_text",
        nested_in="gemma3",
        classes="Gemma3",
        plain_norms=False,
        tied=True,
        post_norm=True,
        full_every=6,
        pattern_key="sliding_window_pattern",
        defaults={"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262_208},
    ),
)
