"""A small tokeniser with chat tokens, and chat templates written the way published ones are."""

from dataclasses import dataclass

import tokenizers

from evenload.data.chat_encoding import open_encoder
from evenload.data.config import DataConfig
from evenload.data.tokenize import train_byte_pair_tokenizer

TEXTS = ["Hello, how are you today?", "def add(a, b):\n    return a + b\n", "naïve café 三 😀", "and so\n\n"] * 20
CHAT_TOKENS = [
    "<s>", "</s>", "[INST]", "[/INST]", "<|im_start|>", "<|im_end|>",
    "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
]  # fmt: skip


@dataclass(frozen=True)
class TemplateCase:
    """A template as published, and the same with what the assistant says between generation tags."""

    name: str
    plain: str
    bos: str
    eos: str
    system: bool = True

    @property
    def tagged(self) -> str:
        return self.plain.replace("{#<#}", "{%- generation -%}").replace("{#>#}", "{%- endgeneration -%}")


CHATML = TemplateCase(
    "chatml",
    """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' -}}
    {%- if message.role == 'assistant' -%}
        {#<#}{{- message.content + '<|im_end|>\\n' -}}{#>#}
    {%- else -%}
        {{- message['content'] + '<|im_end|>\\n' -}}
    {%- endif -%}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
""",
    "<|endoftext|>",
    "<|im_end|>",
)
LLAMA = TemplateCase(
    "llama",
    """{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = strftime_now("%d %b %Y") %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {%- if message['role'] == 'assistant' -%}
        {#<#}{{- message['content'] | trim + '<|eot_id|>' -}}{#>#}
    {%- else -%}
        {{- message['content'] | trim + '<|eot_id|>' -}}
    {%- endif -%}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
""",
    "<|begin_of_text|>",
    "<|eot_id|>",
)
MISTRAL = TemplateCase(
    "mistral",
    """{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{% endif %}
{% if message['role'] == 'user' %}
{{ '[INST] ' + message['content'] + ' [/INST]' -}}
{% elif message['role'] == 'assistant' %}
{#<#}{{ ' ' + message['content'] + eos_token -}}{#>#}
{% else %}
{{ raise_exception('Only user and assistant roles are supported!') }}
{% endif %}
{% endfor %}
""",
    "<s>",
    "</s>",
    system=False,
)
TEMPLATES = (CHATML, LLAMA, MISTRAL)

# Writes thoughts of the last turn only, as reasoning models do.
FORGETFUL = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if loop.last and message.reasoning_content is defined %}
        {{- '(' + message.reasoning_content + ')' }}
    {%- endif %}
    {{- message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


def train_chat_tokenizer(directory):
    """Write a `tokenizer.json` with the chat tokens of all templates, and `exact.json`. The first cuts white space out
    of offsets, as published files do, in which transformers loses the mask of an answer that begins with a space."""
    path = directory / "tokenizer.json"
    train_byte_pair_tokenizer(TEXTS, 400, path)
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    tokenizer.add_special_tokens(CHAT_TOKENS)
    tokenizer.save(str(directory / "exact.json"))
    tokenizer.post_processor = tokenizers.processors.ByteLevel(trim_offsets=True)
    tokenizer.save(str(path))


def chat_encoder(directory, template, **settings):
    """Open an encoder with this chat template, which the directory gets as a file; by default of bytes."""
    file = directory / "template.jinja"
    file.write_text(template)
    return open_encoder(encoder_config(**{"record": "messages", "chat_template": str(file)} | settings))


def encoder_config(**settings):
    return DataConfig(
        **{"sources": ("corpus",), "record": "text", "batch_documents": 1, "max_document_tokens": 1 << 20} | settings
    )


def chat(*contents, system=None):
    turns = [{"role": ("user", "assistant")[at % 2], "content": content} for at, content in enumerate(contents)]
    return turns if system is None else [{"role": "system", "content": system}, *turns]
