"""Make the encoder of the settings (`open_encoder`); render conversations, with loss on what the assistant says.

That is what `{% generation %}` blocks of the template mark. Where it has none, the text of the assistant's message i is
found by rendering parts of the conversation:

    messages[:i], generation prompt   <|user|>Hi<|end|><|assistant|>
    messages[:i + 1]                  <|user|>Hi<|end|><|assistant|>Hello<|end|>
    all messages                      <|user|>Hi<|end|><|assistant|>Hello<|end|><|user|>Bye<|end|> ...
                                                                    ─────────── loss

This holds only if each rendering begins the next one; else the record is refused. A template without a generation
prompt has the assistant's header in the loss. Price: 2 renderings for each of the assistant's messages, so it grows
with the square of the turns; 1 rendering with `{% generation %}` blocks or loss on all tokens.

As in transformers' `apply_chat_template`, keys of messages without a value are left out (Arrow gives every message all
keys of all messages), and thoughts are also given under the names that templates read.

A prompt and a completion are two strings, joined and tokenised together, followed by the end-of-document token, as in
TRL; or two lists of messages, which are one conversation with loss on what the assistant says in the completion (TRL
trains all of the completion).
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from evenload.data.chat_template import ChatTemplate, Message, open_chat_template
from evenload.data.config import DataConfig, mixture_configs
from evenload.data.encoders import (
    CharSpan,
    DocumentEncoder,
    PlainText,
    RecordProblem,
    RenderedText,
    TextEncoder,
    TokenIds,
    check_text,
)
from evenload.data.records import OtherColumnError, record_columns, value_names
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
    """Make the encoder of a configuration without mixture (see `mixture_configs`).

    Args:
        tokenizer: instead of the one that `config.tokenizer` names, next to which the chat template and special tokens
            are still looked up.
        vocab_size: rows of the model's embedding, which every id must be below; None = no model is known.

    Raises:
        ConfigError: a tokeniser with more ids than the model; settings that contradict each other; no chat template
            where one is needed; `append_eos` without an end-of-document token; see also `open_tokenizer` and
            `open_chat_template`.
    """
    for problem in _contradictions(config):
        raise ConfigError(problem)
    tokenizer = tokenizer or open_tokenizer(config.tokenizer, config.eos_token)
    columns = record_columns(config)
    if config.record == "tokens":
        # Bytes are the default of the setting, so they mean nothing for ids that others made.
        own = None if isinstance(tokenizer, ByteTokenizer) else tokenizer.vocab_size
        limit = min((size for size in (own, vocab_size) if size is not None), default=None)
        masks = [column.name for column in columns if column.kind == "mask"]
        return TokenIds(value_names(columns), masks, limit)
    if vocab_size is not None and tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            f"the tokeniser {describe_tokenizer(tokenizer)} makes ids that the model has no embedding for: its "
            f"vocab_size is {vocab_size:,}; set data.tokenizer to the model's own, or train a larger vocab_size"
        )
    names, masked, ignored = value_names(columns), config.loss_on != "all", frozenset(config.ignore_columns)
    if config.record == "messages":
        return TextEncoder(Chats(names, open_chat_template(config, tokenizer), masked, ignored), tokenizer, None)
    opening = required_opening(tokenizer, config.prepend_bos)
    end_id = required_eos(tokenizer) if config.append_eos else None
    if config.record == "text":
        return TextEncoder(PlainText(config.text_column), tokenizer, end_id, opening)
    try:
        template: ChatTemplate | str = open_chat_template(config, tokenizer)
    except ConfigError as err:
        if config.chat_template is not None:
            raise
        template = str(err)  # strings need none, so why there is none waits for a prompt that is a list
    return TextEncoder(PromptCompletion(names, template, masked, ignored), tokenizer, end_id, opening)


def stop_warnings(config: DataConfig, tokenizer: DocumentTokenizer, model_ends: Any = None) -> list[str]:
    """Warn of chat templates that do not teach the assistant to stop.

    Args:
        model_ends: ids with which the model's generation ends, besides the tokeniser's own: one, several, or None.
    """
    several = [tokenizer.eos_id, *(model_ends if isinstance(model_ends, list | tuple) else [model_ends])]
    ends = sorted({index for index in several if index is not None})
    chat = [{"role": "user", "content": "a"}], [{"role": "assistant", "content": "b"}]
    values = {"messages": ([*chat[0], *chat[1]],), "prompt_completion": chat}
    warnings: list[str] = []
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
            warnings.append(
                f"after what the assistant says, the chat template teaches none of the tokens with which generation "
                f"ends ({', '.join(repr(tokenizer.token_text(end)) for end in ends)}), so the trained model will not "
                "stop; set data.eos_token to the special token that the template writes there "
                f"({', '.join(special) or 'it writes none'}), or write eos_token there, inside its "
                "{% generation %} block where it has one"
            )
    return warnings


def _contradictions(config: DataConfig) -> Iterator[str]:
    named = [setting for setting in ("labels_column", "mask_column") if getattr(config, setting)]
    column = f"data.{named[0]} is '{getattr(config, named[0])}'" if named else ""
    record, loss_on = f'data.record "{config.record}"', f'data.loss_on is "{config.loss_on}"'
    if named and config.record != "tokens":
        yield f'{column} with {record}; only "tokens" have labels of their own: leave it out'
    if config.record == "text" and config.loss_on == "completion":
        yield f'{loss_on} with {record}; set data.record to "prompt_completion" or "messages", or leave loss_on out'
    if config.record == "tokens" and config.loss_on == "completion" and not named:
        yield f"{loss_on} with {record}; set data.labels_column or data.mask_column, or leave data.loss_on out"
    if config.record == "tokens" and config.loss_on == "all" and named:
        yield f"{loss_on} and {column}, which says where the loss is; leave one of them out"
    if config.format == "text" and config.record != "text":
        yield f'data.format is "text" with {record}; set data.record to "text", or data.format to what the files are'
    if config.format == "memmap" and config.record != "tokens":
        yield f'data.format is "memmap" with {record}; such files hold ids, so set data.record to "tokens"'


_FIX = 'use a template with {% generation %} blocks (data.chat_template), or set data.loss_on = "all"'
_IGNORE = "change it, or pass over the key by data.ignore_columns"
_WEIGHTS = ("weight", "train", "training", "loss")
_PARTS = ("train_detail", "training_detail")
_CALLS = ("tool_calls", "function_call")
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")


@dataclass(frozen=True)
class Chats:
    """`Renderer` of kind "messages".

    Args:
        columns: of the messages, then those of `ChatTemplate.for_record`.
        template: a string is the reason why there is none.
        has_spans: loss on the assistant's messages only; else on every token after the first.
        ignored: keys of messages that are skipped although they mark which messages have a loss.
    """

    columns: tuple[str, ...]
    template: ChatTemplate | str
    has_spans: bool
    ignored: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        template = self.template.name if isinstance(self.template, ChatTemplate) else None
        loss = "what the assistant says" if self.has_spans else "all"
        return f"{type(self).__name__} {self.columns}, loss on {loss}, template {template}, skip {sorted(self.ignored)}"

    def render(self, values: tuple[Any, ...]) -> RenderedText:
        return self._render([(self.columns[0], values[0])], values[1:])

    def _render(self, parts: Sequence[tuple[str, Any]], others: Sequence[Any]) -> RenderedText:
        """Render the messages of the columns `parts`, the last of which has the loss."""
        if isinstance(self.template, str):
            raise RecordProblem(self.template)
        *before, last = [read_messages(value, column, self.template) for column, value in parts]
        if empty := [column for (column, _), messages in zip(parts, (*before, last), strict=True) if not messages]:
            if not before:
                return RenderedText("", () if self.has_spans else None)
            raise RecordProblem(f"column '{empty[0]}' holds no message; prompt and completion need at least one each")
        prompt = [message for messages in before for message in messages]
        if prompt and prompt[-1]["role"] == last[0]["role"] == "assistant":
            raise RecordProblem(
                f"the last message of '{parts[0][0]}' is the assistant's, as the next is; move it to '{parts[1][0]}'"
            )
        template = self.template.for_record(**dict(zip(self.columns[len(parts) :], others, strict=False)))
        return render_chat(template, [*prompt, *last], len(prompt) if self.has_spans else None, self.ignored)


@dataclass(frozen=True)
class PromptCompletion(Chats):
    """`Renderer` of kind "prompt_completion": `columns` are those of prompt and completion, then as of `Chats`."""

    def render(self, values: tuple[Any, ...]) -> RenderedText:
        prompt, completion, *others = values
        if isinstance(prompt, list | tuple) or isinstance(completion, list | tuple):
            return self._render(list(zip(self.columns, (prompt, completion), strict=False)), others)
        if dict(zip(self.columns[2:], others, strict=False)).get("tools"):
            raise RecordProblem("the record has tools, and its prompt is a text, which no template puts them into")
        prompt = check_text(prompt, self.columns[0])
        whole = prompt + check_text(completion, self.columns[1])
        return RenderedText(whole, ((len(prompt), len(whole)),) if self.has_spans else None, is_bare=True)


def render_chat(
    template: ChatTemplate, messages: Sequence[Message], first: int | None, ignored: Collection[str]
) -> RenderedText:
    """Render a conversation with loss on what the assistant says in `messages[first:]`, except with a weight of 0.

    Args:
        first: None = loss on every token after the first.
        ignored: keys of messages that are skipped.

    Raises:
        RecordProblem: the template does not take the messages, or what the assistant says in them is not known.
    """
    untrained = [index for index, message in enumerate(messages) if _is_untrained(message, index, ignored)]
    for index, message in enumerate(messages):
        for key in (*_PARTS, *(call for call in _CALLS if call not in template.source)):
            if message.get(key) and key not in ignored:
                what = "is not read" if key in _PARTS else f"chat template '{template.origin}' does not write"
                raise OtherColumnError(f"message {index} has {key}, which {what}; {_IGNORE}")
    if first is None:
        if untrained:
            raise OtherColumnError(f'message {untrained[0]} has no loss by its weight, but loss_on is "all"; {_IGNORE}')
        return RenderedText(template.render(messages))
    if not template.marks_generation:
        whole = template.render(messages)
        trained = [index for index in range(first, len(messages)) if index not in untrained]
        return RenderedText(whole, tuple(_assistant_spans(template, messages, whole, trained)))
    whole, spans = template.render_with_spans(messages)

    def edge(index: int) -> int:
        return len(_beginning(template.render(messages[:index]), whole, template, index)) if index else 0

    for begin, stop in [(0, first), *((index, index + 1) for index in untrained if index >= first)]:
        if begin < stop:
            left, right = edge(begin), edge(stop) if stop < len(messages) else len(whole)
            parts = [part for span in spans for part in ((span[0], min(span[1], left)), (max(span[0], right), span[1]))]
            spans = tuple(part for part in parts if part[0] < part[1])
    return RenderedText(whole, spans, counts_touching=True)


def _is_untrained(message: Message, index: int, ignored: Collection[str]) -> bool:
    """Tell whether a message of the assistant has no loss, by `weight` (OpenAI's format) or `train` (Axolotl's)."""
    is_untrained = False
    for key in _WEIGHTS:
        if key in ignored or (weight := message.get(key)) is None:
            continue
        if weight not in (0, 1):
            raise OtherColumnError(f"message {index} has {key} {weight!r}, must be 0 or 1; {_IGNORE}")
        if weight and message["role"] != "assistant":
            raise OtherColumnError(
                f"message {index} of role '{message['role']}' has {key} {weight!r}, and only what the assistant says "
                f"is trained; {_IGNORE}"
            )
        is_untrained |= not weight and message["role"] == "assistant"
    return is_untrained


def read_messages(value: Any, column: str, template: ChatTemplate) -> list[Message]:
    """Read messages as new dictionaries, in the forms that their template writes right.

    Raises:
        RecordProblem: not a list; a message without role, or without content and tool calls; a role that the template
            knows by another name; content that is neither text nor parts of text.
    """
    if not isinstance(value, list | tuple):
        held = "nothing" if value is None else f"a value of type {type(value).__name__}"
        raise RecordProblem(f"column '{column}' holds {held} instead of a list of messages")
    return [_read_message(message, f"message {index} of '{column}'", template) for index, message in enumerate(value)]


def _read_message(value: Any, where: str, template: ChatTemplate) -> Message:
    if not isinstance(value, dict):
        raise RecordProblem(f"{where} is of type {type(value).__name__}, must be an object with role and content")
    message = {key: item for key, item in value.items() if item is not None}
    if not isinstance(message.get("role"), str):
        raise RecordProblem(f"{where} has no 'role' but {sorted(map(str, message))}; rename its keys to role, content")
    if usual := template.usual_role(message["role"]):
        raise RecordProblem(f"{where} has role '{message['role']}', another name of a usual one; call it '{usual}'")
    content = message.get("content")
    if content is None:
        if not message.get("tool_calls"):
            raise RecordProblem(f"{where} (role '{message['role']}') has neither content nor tool_calls")
    elif isinstance(content, list | tuple):
        for part in content:
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                kind = part.get("type") if isinstance(part, dict) else type(part).__name__
                raise RecordProblem(f"{where} has a content part of type '{kind}'; only text can be trained")
    elif not isinstance(content, str):
        raise RecordProblem(f"{where} has content of type {type(content).__name__}, must be text or parts of text")
    thoughts = next((message[key] for key in _THOUGHTS if key in message), None)
    if thoughts is not None:
        message = {"thinking": thoughts, **message, "reasoning_content": thoughts}
    return template.adapted(message)


def _beginning(prompt: str, whole: str, template: ChatTemplate, index: int) -> str:
    """Return what comes before message `index`, after checking that `whole`, all messages, begins with it."""
    if not whole.startswith(prompt):
        raise RecordProblem(
            f"with chat template '{template.origin}' the prompt for message {index} is not how the whole "
            f"conversation begins, so what the assistant says cannot be separated from the prompt; {_FIX}"
        )
    return prompt


def _assistant_spans(
    template: ChatTemplate, messages: Sequence[Message], whole: str, trained: Sequence[int]
) -> list[CharSpan]:
    spans: list[CharSpan] = []
    for index in trained:
        if messages[index]["role"] != "assistant":
            continue
        if index == 0:
            raise RecordProblem(f"the conversation begins with the assistant, which no prompt comes before; {_FIX}")
        prompt = template.render(messages[:index], add_generation_prompt=True)
        start = len(_beginning(prompt, whole, template, index))
        upto = whole if index == len(messages) - 1 else template.render(messages[: index + 1])
        if not whole.startswith(upto):
            raise RecordProblem(
                f"chat template '{template.origin}' writes message {index} differently once other messages follow "
                f"(such as without its thoughts), so what the assistant says is not known; {_FIX}, or end the "
                "conversation there"
            )
        spans.append((start, len(upto)))
    return spans
