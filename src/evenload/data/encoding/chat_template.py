"""`ChatTemplate`: a Hugging Face chat template, rendered with jinja2 in a sandbox, and where the assistant speaks.

The environment is the one that such templates are written for: no white space from block tags, `tojson`,
`raise_exception`, `break` and `continue`, `bos_token` and its like. `{% generation %}` ... `{% endgeneration %}` marks
what the assistant says: a rendering that asks for the spans puts a private character on both sides of such a block and
takes them out again, counting characters. transformers counts the pieces rendered so far instead, which is
the same except in blocks inside of macros and captured text; there our marks could be trimmed or moved, so such
templates are refused.

`strftime_now` gives `TEMPLATE_DAY`, always: a text that changes with the day of the run could not be resumed exactly.
It is the day that Llama 3's template falls back to.

Price: jinja's, 20 to 100 µs a chat. Trust: the sandbox keeps a template from files and processes, not from running
for ever.
"""

import copy
import datetime
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from evenload.data.encoding.document_encoder import RecordProblem
from evenload.data.encoding.text_encoder import CharSpan
from evenload.data.formats.columns import NeighbourProblem
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


class _GenerationBlocks(Extension):
    """`{% generation %}`: passes its content through, between marks where the rendering counts them."""

    tags = {"generation"}  # noqa: RUF012 (jinja declares it as an instance variable)

    def parse(self, parser: Parser) -> nodes.Node:
        """The block as a call of `_mark` with its content."""
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
    """A compiled template. Can be pickled; compares by what it renders.

    Args:
        source: text of the template.
        variables: what the template sees besides the messages, such as `bos_token`.
        origin: how messages name it.

    Raises:
        ConfigError: not a template, or a `{% generation %}` block where its place cannot be told.
    """

    def __init__(self, source: str, variables: Mapping[str, str], origin: str) -> None:
        self.source, self.variables, self.origin = source, dict(variables), origin
        self._inputs: dict[str, Any] = {}
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
        """The messages as text, or a `RecordProblem`; and what opens an assistant's message where that is asked for."""
        return self._render(messages, add_generation_prompt, None)

    def render_with_spans(self, messages: Sequence[Message]) -> tuple[str, tuple[CharSpan, ...]]:
        """The messages as text, and the characters inside `{% generation %}` blocks, ascending and disjoint.

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
            if piece == _OPEN:
                depth += 1
            elif piece == _CLOSE:
                depth -= 1
            else:
                if depth and piece:
                    spans.append((position, position + len(piece)))
                texts.append(piece)
                position += len(piece)
        return "".join(texts), tuple(spans)

    def for_record(self, tools: Any = None, chat_template_kwargs: Any = None) -> "ChatTemplate":
        """The template with what a record gives it beside its messages, as to transformers' `apply_chat_template`.

        Args:
            tools: a list of JSON schemas, or JSON text of one; None = none.
            chat_template_kwargs: further variables.

        Raises:
            RecordProblem: neither of these, or tools that the template does not write.
        """
        if tools is None and not chat_template_kwargs:
            return self
        try:
            tools = json.loads(tools) if isinstance(tools, str) and tools else tools or None
            tools = tools and [json.loads(tool) if isinstance(tool, str) else tool for tool in tools]
        except ValueError as err:
            raise RecordProblem(f"'tools' holds text that is not JSON: {err}") from err
        if tools and "tools" not in self.wanted_variables:
            raise NeighbourProblem(
                f"the record has tools, which chat template '{self.origin}' does not write; {_IGNORE}"
            )
        are_tools = tools is None or all(isinstance(tool, dict) for tool in tools)
        if not are_tools or not isinstance(chat_template_kwargs, dict | None):
            raise RecordProblem(f"'tools' must be a list of objects and 'chat_template_kwargs' an object; {_IGNORE}")
        if taken := _GIVEN & set(chat_template_kwargs or ()):
            raise RecordProblem(f"'chat_template_kwargs' sets {', '.join(sorted(taken))}, which the record itself says")
        bound = copy.copy(self)
        bound._inputs = {"tools": tools, **(chat_template_kwargs or {})}
        return bound

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool, blocks: Iterator[int] | None) -> str:
        given = {"messages": messages, "add_generation_prompt": add_generation_prompt, _BLOCKS: blocks}
        try:
            return self._template.render(self.variables | {"tools": None, "documents": None} | self._inputs | given)
        except Exception as err:  # a template may fail in any way that Python code can
            kind = "" if isinstance(err, jinja2.TemplateError) else f"{type(err).__name__}: "
            raise RecordProblem(f"the chat template '{self.origin}' does not take these messages: {kind}{err}") from err


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja's own filter escapes HTML, which has no place in a prompt.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _generation_blocks(syntax: nodes.Template, origin: str) -> Iterator[nodes.CallBlock]:
    """All `{% generation %}` blocks; an error at one whose rendering may be changed before it is put out."""
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
