"""`open_encoder`: makes the encoder of the settings, or refuses settings that contradict each other."""

from typing import Any

from evenload.data.chat_template import ChatTemplate, open_chat_template
from evenload.data.chats import Chats, PromptCompletion
from evenload.data.config import DataConfig, mixture_configs
from evenload.data.encoders import DocumentEncoder, PlainText, RecordProblem, TextEncoder, TokenIds
from evenload.data.records import record_columns, value_names
from evenload.data.tokenize import (
    ByteTokenizer,
    DocumentTokenizer,
    FileTokenizer,
    describe_tokenizer,
    open_tokenizer,
    required_eos,
    required_opening,
)
from evenload.errors import ConfigError


def open_encoder(
    config: DataConfig, tokenizer: DocumentTokenizer | None = None, vocab_size: int | None = None
) -> DocumentEncoder:
    """The encoder of a configuration without mixture (see `mixture_configs`).

    Args:
        tokenizer: used instead of the one that `config.tokenizer` names; the chat template and special tokens are
            still looked up next to that.
        vocab_size: rows of the model's embedding, which every id must be below; None = no model is known.

    Raises:
        ConfigError: a tokeniser with more ids than the model; settings that contradict each other; no chat template
            where one is needed; `append_eos` without an end-of-document token; see also `open_tokenizer` and
            `open_chat_template`.
    """
    _check(config)
    tokenizer = tokenizer or open_tokenizer(config.tokenizer, config.eos_token)
    columns = record_columns(config)
    if config.record == "tokens":
        # Bytes are what the setting is by default, so they mean nothing for ids that others made.
        own = None if isinstance(tokenizer, ByteTokenizer) else tokenizer.vocab_size
        limit = min((size for size in (own, vocab_size) if size is not None), default=None)
        masks = [column.name for column in columns if column.kind == "mask"]
        return TokenIds(value_names(columns), masks, limit)
    if vocab_size is not None and tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            f"the tokeniser {describe_tokenizer(tokenizer)} makes ids that the model has no embedding for: its "
            f"vocab_size is {vocab_size:,}; set data.tokenizer to the model's own tokeniser, or train a model with a "
            "larger vocab_size"
        )
    masked = config.loss_on != "all"
    names, ignored = value_names(columns), config.ignore_columns
    if config.record == "messages":
        return TextEncoder(Chats(names, open_chat_template(config, tokenizer), masked, ignored), tokenizer, None)
    opening = required_opening(tokenizer, config.prepend_bos)
    end_id = required_eos(tokenizer) if config.append_eos else None
    if config.record == "text":
        return TextEncoder(PlainText(config.text_column), tokenizer, end_id, opening)
    template = _optional_template(config, tokenizer)
    renderer = PromptCompletion(names, template, masked, ignored)
    return TextEncoder(renderer, tokenizer, end_id, opening)


def stop_warnings(config: DataConfig, tokenizer: DocumentTokenizer, model_ends: Any = None) -> list[str]:
    """Warnings about chat templates that do not teach the assistant to stop.

    Args:
        model_ends: ids with which the model's generation ends, besides the tokeniser's own: one, several, or none.
    """
    several = [tokenizer.eos_id, *(model_ends if isinstance(model_ends, list | tuple) else [model_ends])]
    ends = sorted({index for index in several if index is not None})
    chat = [{"role": "user", "content": "a"}], [{"role": "assistant", "content": "b"}]
    values = {"messages": ([*chat[0], *chat[1]],), "prompt_completion": chat}
    found: list[str] = []
    for part in mixture_configs(config):
        # Bytes have no token that a template could write.
        if not ends or part.record not in values or not isinstance(tokenizer, FileTokenizer):
            continue
        try:
            tokens, labels = open_encoder(part, tokenizer).encode(values[part.record])
        except RecordProblem:  # a template for other conversations, or none, which only strings need
            continue
        taught = set((tokens if labels is None else labels).tolist())
        if not taught & set(ends):
            special = [text for text, index in tokenizer.special_tokens().items() if index in taught]
            found.append(
                f"after what the assistant says, the chat template teaches none of the tokens with which generation "
                f"ends ({', '.join(repr(tokenizer.token_text(end)) for end in ends)}), so the trained model will not "
                "stop; set data.eos_token to the special token that the template writes there "
                f"({', '.join(special) or 'it writes none'}), or write eos_token there, inside its "
                "{% generation %} block where it has one"
            )
    return found


def _optional_template(config: DataConfig, tokenizer: DocumentTokenizer) -> ChatTemplate | str:
    """The template for prompts that are lists of messages; strings need none, so why there is none waits for one."""
    try:
        return open_chat_template(config, tokenizer)
    except ConfigError as err:
        if config.chat_template is not None:
            raise
        return str(err)


def _check(config: DataConfig) -> None:
    named = [setting for setting in ("labels_column", "mask_column") if getattr(config, setting)]
    if named and config.record != "tokens":
        raise ConfigError(
            f'data.{named[0]} is \'{getattr(config, named[0])}\' with data.record "{config.record}"; only "tokens" '
            "have labels of their own: leave it out"
        )
    if config.record == "text" and config.loss_on == "completion":
        raise ConfigError(
            'data.loss_on is "completion" with data.record "text", which has no completion; set data.record to '
            '"prompt_completion" or "messages", or leave data.loss_on out'
        )
    if config.record == "tokens" and config.loss_on == "completion" and not named:
        raise ConfigError(
            'data.loss_on is "completion" with data.record "tokens", which do not mark the completion; set '
            "data.labels_column or data.mask_column, or leave data.loss_on out"
        )
    if config.record == "tokens" and config.loss_on == "all" and named:
        raise ConfigError(
            f"data.loss_on is \"all\" with data.{named[0]} '{getattr(config, named[0])}', which says where the loss "
            "is; leave one of them out"
        )
    if config.format == "text" and config.record != "text":
        raise ConfigError(
            f'data.format is "text" with data.record "{config.record}"; a text file is one text: set data.record to '
            '"text", or data.format to what the files are'
        )
    if config.format == "memmap" and config.record != "tokens":
        raise ConfigError(
            f'data.format is "memmap" with data.record "{config.record}"; such files hold ids, so set '
            'data.record to "tokens"'
        )
