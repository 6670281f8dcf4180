"""Render a Hugging Face chat template with jinja2 in a sandbox, and find where the assistant speaks (`ChatTemplate`).

`{% generation %}` ... `{% endgeneration %}` marks what the assistant says: a rendering with spans puts a private
character on both sides of such a block and takes them out again, counting characters. Inside of macros and captured
text they could be trimmed or moved, so such templates are refused.

`strftime_now` always gives `TEMPLATE_DAY`: a text that changes with the day could not be resumed exactly. It is the
day that Llama 3's template falls back to. Price: jinja's, 20 to 100 µs a chat. Trust: the sandbox keeps a template from
files and processes, not from running for ever.

The template is the file `data.chat_template`; else `chat_template.jinja` in the tokeniser's directory; else
`chat_template` in its `tokenizer_config.json`, text or a list of named ones of which "default" is taken: the order of
transformers. One that uses a special token that no file defines is refused: it would be left out silently.

Content is text or a list of parts of text; arguments of a tool call are an object or JSON text (OpenAI's form). A
template that expects the other form writes it wrong without an error. So a short conversation is rendered in both
forms, once a template and role; where exactly one comes out right, messages are given in that one.
"""

import copy
import datetime
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from evenload.data.config import DataConfig
from evenload.data.encoders import CharSpan, RecordProblem
from evenload.data.records import OtherColumnError
from evenload.data.tokenize import (
    BYTES,
    NAMED_TOKENS,
    DocumentTokenizer,
    FileTokenizer,
    special_settings,
    special_token_text,
)
from evenload.errors import ConfigError

Message = dict[str, Any]

TEMPLATE_DAY = datetime.datetime(2024, 7, 26)
"""What `strftime_now` formats."""

# Noncharacters: Unicode keeps them for use inside a program.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
_MARKS = re.compile(f"([{_OPEN}{_CLOSE}])")
_BLOCKS = "_evenload_generation_blocks"
_GIVEN = {"messages", "tools", "add_generation_prompt", _BLOCKS}
_IGNORE = "repair the record, or pass over the column by data.ignore_columns"


_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_OTHER_NAMES = {"human": "user", "gpt": "assistant", "bot": "assistant", "chatbot": "assistant", "model": "assistant"}
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
    """A compiled template; can be pickled.

    Args:
        source: text of the template.
        variables: what the template sees besides the messages, such as `bos_token`.
        origin: names it in error messages.

    Raises:
        ConfigError: not a template, or a `{% generation %}` block whose place is not known.
    """

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
        self.marks_generation = any(_generation_blocks(syntax, origin))

    def __reduce__(self) -> tuple[type["ChatTemplate"], tuple[str, dict[str, str], str]]:
        return ChatTemplate, (self.source, self.variables, self.origin)

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        """Render messages, with a generation prompt also what opens an answer; `RecordProblem` where it fails."""
        return self._render(messages, add_generation_prompt, None)

    def render_with_spans(self, messages: Sequence[Message]) -> tuple[str, tuple[CharSpan, ...]]:
        """Render messages; also return the characters inside `{% generation %}` blocks, ascending and disjoint.

        Raises:
            RecordProblem: as `render`; or the messages hold the characters that mark blocks.
        """
        blocks = itertools.count()
        pieces = _MARKS.split(self._render(messages, False, blocks))
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
        variables, as transformers' `apply_chat_template` takes them.

        Raises:
            RecordProblem: they are neither of these, or the template does not write tools.
        """
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
        bound = copy.copy(self)
        bound._inputs = {"tools": tools, **(chat_template_kwargs or {})}
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

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool, blocks: Iterator[int] | None) -> str:
        given = {"messages": messages, "add_generation_prompt": add_generation_prompt, _BLOCKS: blocks}
        try:
            return self._template.render(self.variables | {"tools": None, "documents": None} | self._inputs | given)
        except Exception as err:  # a template may fail in any way that Python code can
            kind = "" if isinstance(err, jinja2.TemplateError) else f"{type(err).__name__}: "
            raise RecordProblem(f"the chat template '{self.origin}' does not take these messages: {kind}{err}") from err


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
    path = None if config.tokenizer in (None, BYTES) else Path(config.tokenizer)
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
    if directory is None and config.chat_template is None:
        raise ConfigError(
            "records hold messages, and plain bytes have no chat template; set data.chat_template to a file with one"
        )
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
        template = named.get("default")
        if template is None:
            names = sorted(map(str, named))
            raise ConfigError(f"'{origin}' has chat templates {names} and no default; set data.chat_template to a file")
    if template is None:
        raise ConfigError(
            f"the records hold messages, and there is no chat template in '{origin}' and no chat_template.jinja "
            "next to it; set data.chat_template to a file with one"
        )
    if not isinstance(template, str):
        raise ConfigError(f"chat_template in '{origin}' is of type {type(template).__name__}, must be text")
    return origin, template


def _calls(arguments: Any) -> list[dict[str, Any]]:
    # Mistral's templates want ids of nine letters and digits.
    return [{"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": arguments}}]


def _with_arguments(call: Any, form: str | None) -> Any:
    """Return the call with its arguments in that form, where they have the other one."""
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
