"""Make the encoder of the settings (`open_encoder`); render conversations, with loss on what the assistant says.

`ChatTemplate` renders a Hugging Face chat template with jinja2 in a sandbox (which keeps it from files and processes,
not from running for ever). A rendering with spans puts a private character on both sides of `{% generation %}` blocks
and counts characters. Where a template has no blocks, the text of the assistant's message i is what lies between two
renderings of parts of the conversation; each must begin the next one, else the record is refused:

    messages[:i], generation prompt   <|user|>Hi<|end|><|assistant|>
    messages[:i + 1]                  <|user|>Hi<|end|><|assistant|>Hello<|end|>

Price: 20 to 100 µs a rendering; 2 for each of the assistant's messages, 1 with blocks or loss on all.

Content is text or parts of text, arguments of a tool call an object or JSON text, and a template that expects the other
form writes it wrong without an error. So a short conversation is rendered in both forms, once a template and role;
where exactly one comes out right, messages are given in that one.
"""

import datetime
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import msgspec
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from evenload.data.config import DataConfig, mixture_configs
from evenload.data.encoders import (
    CharSpan,
    DocumentEncoder,
    RecordProblem,
    RenderedText,
    Renderer,
    TextEncoder,
    TokenIds,
    check_text,
)
from evenload.data.hub import local_path
from evenload.data.records import OtherColumnError, record_columns, value_names
from evenload.data.tokenize import (
    BYTES,
    NAMED_TOKENS,
    ByteTokenizer,
    DocumentTokenizer,
    FileTokenizer,
    describe_tokenizer,
    open_tokenizer,
    required_eos,
    required_opening,
    special_settings,
    special_token_text,
)
from evenload.errors import ConfigError

Message = dict[str, Any]

TEMPLATE_DAY = datetime.datetime(2024, 7, 26)

# Noncharacters: Unicode keeps them for use inside a program.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
_MARKS = re.compile(f"([{_OPEN}{_CLOSE}])")
_BLOCKS = "_evenload_generation_blocks"
_GIVEN = {"messages", "tools", "add_generation_prompt", _BLOCKS}
_FIX = 'use a template with {% generation %} blocks (data.chat_template), or set data.loss_on = "all"'
_IGNORE = "repair the record, or pass over the key by data.ignore_columns"

CHATML = "chatml"
"""Value of `data.chat_template` for a plain template, which writes tools and calls as JSON."""
CHATML_SOURCE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{% if message.role == 'assistant' %}{% generation %}{{ message.content or '' }}"
    "{% for call in message.tool_calls %}{{ call | tojson }}{% endfor %}<|im_end|>\n{% endgeneration %}{% else %}"
    "{{ message.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_OTHER_NAMES = {"human": "user", "gpt": "assistant", "bot": "assistant", "chatbot": "assistant", "model": "assistant"}
_FROM_NAMES = {name: name for name in _ROLES} | _OTHER_NAMES | {"chatgpt": "assistant", "observation": "tool"}
"""Roles of messages with from and value."""
_TEXT, _USER = "Qz7", {"role": "user", "content": "q"}
# The two forms: of content, and of arguments ("arguments" is no role that anybody has).
_FORMS = {"parts": [{"type": "text", "text": _TEXT}], "text": _TEXT}
_ARGUMENTS = {"object": {_TEXT: 1}, "text": json.dumps({_TEXT: 1})}
# A repr of an object, a part as a whole, or JSON in JSON.
_IS_WRONG = re.compile(r"""\{'Qz7'|['"]text\\*['"]: *\\*['"]Qz7|\\"Qz7""")


class _GenerationBlocks(Extension):
    """`{% generation %}`: passes its content through, between marks where the rendering counts them."""

    tags = {"generation"}  # noqa: RUF012 (jinja declares it as an instance variable)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        content = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_mark", [nodes.ContextReference()], lineno=line)
        return nodes.CallBlock(call, [], [], content, lineno=line)

    def _mark(self, context: Context, caller: Callable[[], str]) -> str:
        blocks = context.get(_BLOCKS)
        if blocks is None:
            return caller()
        next(blocks)
        return f"{_OPEN}{caller()}{_CLOSE}"


class ChatTemplate:
    """A compiled template of text `source`; can be pickled. `variables` are what it sees besides the messages, such as
    `bos_token`; `ConfigError` for no template, or a `{% generation %}` block in a macro."""

    def __init__(self, source: str, variables: Mapping[str, str], origin: str) -> None:
        self.source, self.variables, self.origin = source, dict(variables), origin
        self._inputs: dict[str, Any] = {}
        self._forms: dict[str, str | None] = {}
        content = json.dumps([source, sorted(self.variables.items())])
        self.name = hashlib.sha256(content.encode()).hexdigest()[:16]
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        functions: dict[str, Any] = {"raise_exception": _raise_exception, "strftime_now": TEMPLATE_DAY.strftime}
        environment.globals |= functions
        try:
            syntax = environment.parse(source)
            self._template = environment.from_string(syntax)
        except jinja2.TemplateSyntaxError as err:
            raise ConfigError(f"chat template '{origin}', line {err.lineno}: {err.message}; repair it") from err
        self.wanted_variables: frozenset[str] = frozenset(meta.find_undeclared_variables(syntax))
        self.marks_generation = bool(list(_generation_blocks(syntax, origin)))

    def __reduce__(self) -> tuple[type["ChatTemplate"], tuple[str, dict[str, str], str]]:
        return ChatTemplate, (self.source, self.variables, self.origin)

    def render(
        self, messages: Sequence[Message], add_generation_prompt: bool = False, blocks: Iterator[int] | None = None
    ) -> str:
        """Render messages, with a generation prompt also what opens an answer; `RecordProblem` where it fails. `blocks`
        counts `{% generation %}` blocks, which are then between marks."""
        given = {"messages": messages, "add_generation_prompt": add_generation_prompt, _BLOCKS: blocks}
        try:
            return self._template.render(self.variables | {"tools": None, "documents": None} | self._inputs | given)
        except Exception as err:  # a template may fail in any way that Python code can
            kind = "" if isinstance(err, jinja2.TemplateError) else f"{type(err).__name__}: "
            raise RecordProblem(f"the chat template '{self.origin}' does not take these messages: {kind}{err}") from err

    def render_with_spans(self, messages: Sequence[Message]) -> tuple[str, tuple[CharSpan, ...]]:
        """Render messages; also return the characters inside `{% generation %}` blocks, ascending and disjoint."""
        blocks = itertools.count()
        pieces = _MARKS.split(self.render(messages, blocks=blocks))
        # Two marks a block, and each mark stands between two pieces of text.
        if len(pieces) != 4 * next(blocks) + 1:
            raise RecordProblem(f"the messages hold U+{ord(_OPEN):X} or U+{ord(_CLOSE):X}, which no text may hold")
        spans, texts, position, depth = [], [], 0, 0
        for piece in pieces:
            if piece in (_OPEN, _CLOSE):
                depth += 1 if piece == _OPEN else -1
                continue
            if depth and piece:
                spans.append((position, position + len(piece)))
            texts.append(piece)
            position += len(piece)
        return "".join(texts), tuple(spans)

    def for_record(self, tools: Any = None, chat_template_kwargs: Any = None) -> "ChatTemplate":
        """Return the template with a record's tools (a list of JSON schemas, or JSON text of one) and further
        variables; `RecordProblem` where they are something else."""
        if tools is None and not chat_template_kwargs:
            return self
        try:
            tools = json.loads(tools) if isinstance(tools, str) and tools else tools or None
            tools = tools and [json.loads(tool) if isinstance(tool, str) else tool for tool in tools]
        except ValueError as err:
            raise RecordProblem(f"'tools' holds text that is not JSON: {err}") from err
        if tools and "tools" not in self.wanted_variables:
            raise OtherColumnError(f"it has tools, which chat template '{self.origin}' does not write; {_IGNORE}")
        are_tools = tools is None or all(isinstance(tool, dict) for tool in tools)
        if not are_tools or not isinstance(chat_template_kwargs, dict | None):
            raise RecordProblem(f"'tools' must be a list of objects and 'chat_template_kwargs' an object; {_IGNORE}")
        if taken := _GIVEN & set(chat_template_kwargs or ()):
            raise RecordProblem(f"'chat_template_kwargs' sets {', '.join(sorted(taken))}, which the record itself sets")
        bound = object.__new__(ChatTemplate)  # a copy would compile the template again
        bound.__dict__ |= self.__dict__ | {"_inputs": {"tools": tools, **(chat_template_kwargs or {})}}
        return bound

    def usual_role(self, role: str) -> str | None:
        """Return the usual name of a role that has another one here; None where it may stay."""
        lower = role.strip().lower()
        usual = _OTHER_NAMES.get(lower, lower)
        if role in _ROLES or usual not in _ROLES:
            return None
        is_named = f"'{role}'" in self.source or f'"{role}"' in self.source
        # Without blocks, the role's name shows what the assistant says.
        return None if is_named and (usual != "assistant" or self.marks_generation) else usual

    def adapted(self, message: Message) -> Message:
        content, calls = message.get("content"), message.get("tool_calls")
        form = None if content is None else self._form(message["role"])
        if form == "text" and not isinstance(content, str):
            message = message | {"content": "".join(part["text"] for part in content or ())}
        elif form == "parts" and isinstance(content, str):
            message = message | {"content": [{"type": "text", "text": content}]}
        if isinstance(calls, list | tuple):
            message = message | {"tool_calls": [_with_arguments(call, self._form("arguments")) for call in calls]}
        return message

    def _form(self, of: str) -> str | None:
        if of not in self._forms:
            written = (
                {form: self._written("assistant", tool_calls=_calls(value)) for form, value in _ARGUMENTS.items()}
                if of == "arguments"
                else {form: self._written(of, content=value) for form, value in _FORMS.items()}
            )
            right = [form for form, text in written.items() if _TEXT in text and not _IS_WRONG.search(text)]
            self._forms[of] = right[0] if len(right) == 1 else None
        return self._forms[of]

    def _written(self, role: str, **keys: Any) -> str:
        """Render a conversation with such a message; "" where the template does not take it."""
        before: list[Message] = [] if role in ("system", "developer", "user") else [_USER]
        if role in ("tool", "function"):
            before.append({"role": "assistant", "content": "", "tool_calls": _calls({})})
            keys |= {"tool_call_id": "abcdefghi", "name": "f"}
        after = [_USER] if role in ("system", "developer") else []
        try:
            return self.render([*before, {"role": role, "content": "", **keys}, *after])
        except RecordProblem:
            return ""


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # jinja's own filter escapes HTML, which has no place in a prompt.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _generation_blocks(syntax: nodes.Template, origin: str) -> Iterator[nodes.CallBlock]:
    """Yield all `{% generation %}` blocks; refuse one whose rendering may be changed before it is put out."""
    pending: list[tuple[nodes.Node, str]] = [(syntax, "")]
    while pending:
        node, inside = pending.pop()
        if isinstance(node, nodes.CallBlock) and isinstance(node.call.node, nodes.ExtensionAttribute):
            if inside:
                raise ConfigError(
                    f"chat template '{origin}', line {node.lineno}: a generation block inside a {inside} may be "
                    "changed before it is put out, so its place is not known; write it directly into the loop"
                )
            yield node
        elif isinstance(node, nodes.Macro | nodes.CallBlock):
            inside = "macro"
        elif isinstance(node, nodes.AssignBlock | nodes.FilterBlock):
            inside = "set or filter block"
        pending.extend((child, inside) for child in node.iter_child_nodes())


def open_chat_template(config: DataConfig, tokenizer: DocumentTokenizer) -> ChatTemplate:
    """Open the chat template of the settings; `ConfigError` where there is none or its special tokens are not known."""
    named = config.tokenizer
    path = None if named in (None, BYTES) else Path(local_path(named, "data.tokenizer", "tokenizer"))
    directory = path if path is None or path.is_dir() else path.parent
    known = special_settings(directory) if directory else {}
    origin, source = _find_source(config, directory, known)
    variables = {
        name: text for name, value in known.items() if name.endswith("_token") and (text := special_token_text(value))
    }
    if config.eos_token is not None:
        variables["eos_token"] = config.eos_token
    elif "eos_token" not in known and isinstance(tokenizer, FileTokenizer) and tokenizer.eos_id is not None:
        variables["eos_token"] = tokenizer.token_text(tokenizer.eos_id) or ""
    template = ChatTemplate(source, variables, origin)
    if missing := sorted((template.wanted_variables & set(NAMED_TOKENS)) - set(known) - set(variables)):
        why = "bytes have no such tokens; write other text there, or use a tokenizer.json"
        if directory is not None:
            where = f"next to tokenizer '{config.tokenizer}'"
            why = f"no file {where} defines that; set it in tokenizer_config.json (null = nothing)"
        raise ConfigError(f"chat template '{origin}' writes {', '.join(missing)}, but {why}")
    return template


def _find_source(config: DataConfig, directory: Path | None, settings: dict[str, Any]) -> tuple[str, str]:
    if config.chat_template == CHATML:
        return CHATML, CHATML_SOURCE
    fix = f'set data.chat_template to a file, or to "{CHATML}" for a plain one'
    if directory is None and config.chat_template is None:
        raise ConfigError(f"records hold messages, and plain bytes have no chat template; {fix}")
    home = directory or Path()
    file = Path(config.chat_template or home / "chat_template.jinja")
    if config.chat_template is not None or file.is_file():
        try:
            return str(file), file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as err:
            raise ConfigError(f"chat template '{file}' cannot be read: {err}; set data.chat_template") from err
    origin = str(home / "tokenizer_config.json")
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        if (template := named.get("default")) is None:
            names = sorted(map(str, named))
            raise ConfigError(f"'{origin}' has chat templates {names} and no default; set data.chat_template to a file")
    if template is None:
        raise ConfigError(f"no chat template in '{origin}', no chat_template.jinja next to it; {fix}")
    if not isinstance(template, str):
        raise ConfigError(f"chat_template in '{origin}' is of type {type(template).__name__}, must be text")
    return origin, template


def _calls(arguments: Any) -> list[dict[str, Any]]:
    # Mistral's templates want ids of nine letters and digits.
    return [{"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": arguments}}]


def _with_arguments(call: Any, form: str | None) -> Any:
    if isinstance(call, dict) and isinstance(call.get("function"), dict):
        return call | {"function": _with_arguments(call["function"], form)}
    arguments = call.get("arguments") if isinstance(call, dict) else None
    if form == "text" and isinstance(arguments, dict):
        return call | {"arguments": json.dumps(arguments, ensure_ascii=False)}
    if form == "object" and isinstance(arguments, str):
        try:
            decoded = json.loads(arguments)
        except ValueError:
            return call
        return call | {"arguments": decoded} if isinstance(decoded, dict) else call
    return call


_WEIGHTS = ("weight", "train", "training", "loss")
_PARTS = ("train_detail", "training_detail")
_CALLS = ("tool_calls", "function_call")
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")


@dataclass(frozen=True)
class Chats(Renderer):
    """`Renderer` of kind "messages": `columns` are the messages, then those of `ChatTemplate.for_record`.

    A `template` that is a string is the reason why there is none; `has_spans` = loss on what the assistant says only;
    `ignored` are keys of messages that are skipped although they mark which messages have a loss.
    """

    template: ChatTemplate | str
    has_spans: bool
    ignored: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        template = self.template.name if isinstance(self.template, ChatTemplate) else None
        loss = "what the assistant says" if self.has_spans else "all"
        return f"{type(self).__name__} {self.columns}, loss on {loss}, template {template}, skip {sorted(self.ignored)}"

    def render(self, values: tuple[Any, ...]) -> RenderedText:
        return self._render([(self.columns[0], values[0])], self._others(1, values))

    def _others(self, count: int, values: Sequence[Any]) -> dict[str, Any]:
        """Return the values of the columns behind the first `count`, by name."""
        return dict(zip(self.columns[count:], values[count:], strict=False))

    def _render(self, parts: Sequence[tuple[str, Any]], others: Mapping[str, Any]) -> RenderedText:
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
            first, second = (column for column, _ in parts)
            raise RecordProblem(
                f"the last message of '{first}' is the assistant's, as the next is; move it to '{second}'"
            )
        template = self.template.for_record(**others)
        return render_chat(template, [*prompt, *last], len(prompt) if self.has_spans else None, self.ignored)


class PromptCompletion(Chats):
    """`Renderer` of kind "prompt_completion": two strings, tokenised together, or two lists of messages."""

    def render(self, values: tuple[Any, ...]) -> RenderedText:
        prompt, completion, others = *values[:2], self._others(2, values)
        if isinstance(prompt, list | tuple) or isinstance(completion, list | tuple):
            return self._render(list(zip(self.columns, (prompt, completion), strict=False)), others)
        if others.get("tools"):
            raise RecordProblem("the record has tools, and its prompt is a text, which no template puts them into")
        prompt = check_text(prompt, self.columns[0])
        whole = prompt + check_text(completion, self.columns[1])
        return RenderedText(whole, ((len(prompt), len(whole)),) if self.has_spans else None, is_bare=True)


class Preference(PromptCompletion):
    """`Renderer` of an answer of a preference pair, behind a prompt; None = its messages begin with that."""

    def render(self, values: tuple[Any, ...]) -> RenderedText:
        if values[0] is None:
            return self._render([(self.columns[1], values[1])], self._others(2, values))
        return super().render(values)


class Instructions(Chats):
    """`Renderer` of kind "instruction": what the user says is the instruction, and the input below it; the output is
    what the assistant says."""

    def render(self, values: tuple[Any, ...]) -> RenderedText:
        others = self._others(2, values)
        more = others.pop("input", None)
        asked = [check_text(values[0], self.columns[0]), "" if more is None else check_text(more, "input")]
        prompt = {"role": "user", "content": "\n\n".join(filter(None, asked))}
        answer = {"role": "assistant", "content": check_text(values[1], self.columns[1])}
        return self._render([(self.columns[0], [prompt]), (self.columns[1], [answer])], others)


def render_chat(
    template: ChatTemplate, messages: Sequence[Message], first: int | None, ignored: Collection[str]
) -> RenderedText:
    """Render a conversation with loss on what the assistant says in `messages[first:]` (None = on every token after the
    first), except with a weight of 0; `ignored` keys of messages are skipped. Raises `RecordProblem`."""
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
    """Read messages as new dictionaries, in the forms that their template writes right; else raise `RecordProblem`."""
    if not isinstance(value, list | tuple):
        held = "nothing" if value is None else f"a value of type {type(value).__name__}"
        raise RecordProblem(f"column '{column}' holds {held} instead of a list of messages")
    return [_read_message(message, f"message {index} of '{column}'", template) for index, message in enumerate(value)]


def _read_message(value: Any, where: str, template: ChatTemplate) -> Message:
    if not isinstance(value, dict):
        raise RecordProblem(f"{where} is of type {type(value).__name__}, must be an object with role and content")
    message = {key: item for key, item in value.items() if item is not None}
    if "from" in message and "role" not in message:
        message = _with_usual_keys(message, where)
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


def _with_usual_keys(message: Message, where: str) -> Message:
    """Return a message of ShareGPT's keys, from and value, with role and content, or with the call of a tool."""
    name, content = str(message.pop("from")).strip().lower(), message.pop("value", None)
    if name in _FROM_NAMES:
        return {"role": _FROM_NAMES[name], "content": content} | message
    if name != "function_call":
        raise RecordProblem(f"{where} is from '{name}'; known are {', '.join(_FROM_NAMES)}, function_call")
    try:
        call = msgspec.json.decode(content, type=dict[str, Any])
    except (msgspec.DecodeError, TypeError) as err:
        raise RecordProblem(f"{where} is a function_call, but its value is no JSON object: {err}") from err
    return {"role": "assistant", "tool_calls": [{"type": "function", "function": call}]} | message


def _beginning(prompt: str, whole: str, template: ChatTemplate, index: int) -> str:
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
        start = len(_beginning(template.render(messages[:index], True), whole, template, index))
        upto = whole if index == len(messages) - 1 else template.render(messages[: index + 1])
        if not whole.startswith(upto):
            raise RecordProblem(
                f"chat template '{template.origin}' writes message {index} differently once other messages follow "
                f"(such as without its thoughts); {_FIX}, or end the conversation there"
            )
        spans.append((start, len(upto)))
    return spans


def open_encoder(
    config: DataConfig, tokenizer: DocumentTokenizer | None = None, vocab_size: int | None = None
) -> DocumentEncoder:
    """Make the encoder of a configuration without mixture (see `mixture_configs`).

    `tokenizer` is taken instead of the one that `config.tokenizer` names, next to which templates are still looked up.
    Every id must be below `vocab_size`, the rows of the model's embedding (None = not known). Raises `ConfigError`: a
    tokeniser with more ids, settings that contradict each other, no chat template or end-of-document token where one is
    needed.
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
    if config.record in ("messages", "conversations", "instruction"):
        renderer = Instructions if config.record == "instruction" else Chats
        return TextEncoder(renderer(names, open_chat_template(config, tokenizer), masked, ignored), tokenizer, None)
    opening = required_opening(tokenizer, config.prepend_bos)
    end_id = required_eos(tokenizer) if config.append_eos else None
    if config.record == "text":
        return TextEncoder(Renderer((config.text_column,)), tokenizer, end_id, opening)
    try:
        template: ChatTemplate | str = open_chat_template(config, tokenizer)
    except ConfigError as err:
        if config.chat_template is not None:
            raise
        template = str(err)  # strings need none, so why there is none waits for a prompt that is a list
    renderer = PromptCompletion
    if config.record == "preference":
        renderer, names = Preference, ("prompt", "chosen or rejected", *names[3:])
    return TextEncoder(renderer(names, template, masked, ignored), tokenizer, end_id, opening)


def stop_warnings(config: DataConfig, tokenizer: DocumentTokenizer, model_ends: Any = None) -> list[str]:
    """Warn of chat templates that do not teach the assistant to stop; `model_ends` are ids with which the model's
    generation ends, besides the tokeniser's own: one, several, or None."""
    several = [tokenizer.eos_id, *(model_ends if isinstance(model_ends, list | tuple) else [model_ends])]
    ends = sorted({index for index in several if index is not None})
    chat = [{"role": "user", "content": "a"}], [{"role": "assistant", "content": "b"}]
    values = dict.fromkeys(("messages", "conversations"), ([*chat[0], *chat[1]],))
    values |= {"prompt_completion": chat, "preference": chat, "instruction": ("a", "b")}
    warnings: list[str] = []
    for part in mixture_configs(config):
        # Bytes have no token that a template could write.
        if not ends or part.record not in values or not isinstance(tokenizer, FileTokenizer):
            continue
        try:
            document = open_encoder(part, tokenizer).encode(values[part.record])
        except RecordProblem:  # a template for other conversations, or none, which only strings need
            continue
        taught = set((document.tokens if document.labels is None else document.labels).tolist())
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
