"""A small fast tokeniser of transformers with an end of document and a chat template."""

import tempfile
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from evenload.data.tokenize import train_byte_pair_tokenizer

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ message.content }}{% endif %}{% endfor %}"
)


def some_tokenizer() -> PreTrainedTokenizerFast:
    """Its files are gone: it is an object alone."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.json"
        train_byte_pair_tokenizer(["a small text", "another small text"], 280, path)
        fast = PreTrainedTokenizerFast(tokenizer_file=str(path), eos_token="<|endoftext|>")
    fast.chat_template = TEMPLATE
    return fast
