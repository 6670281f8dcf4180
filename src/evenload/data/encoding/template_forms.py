"""`TemplateForms`: in which form a chat template wants what data sets write in several.

Content is text or a list of parts of text; arguments of a tool call are an object or JSON text (OpenAI's form). A
template that expects the other form writes it wrong without an error: parts as a Python repr, JSON text encoded once
more, text that it walks through as parts as nothing. So a short conversation is rendered in both forms, once a template
and role. Where one comes out right and the other does not, messages are given in that one; else they stay as they are.
"""

import json
import re
from typing import Any

from evenload.data.encoding.chat_template import ChatTemplate, Message
from evenload.data.encoding.document_encoder import RecordProblem

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_OTHER_NAMES = {"human": "user", "gpt": "assistant", "bot": "assistant", "chatbot": "assistant", "model": "assistant"}
_TEXT, _USER = "Qz7", {"role": "user", "content": "q"}
# The two forms: of content, and of arguments ("arguments" is no role that anybody has).
_FORMS = {"parts": [{"type": "text", "text": _TEXT}], "text": _TEXT}
_ARGUMENTS = {"object": {_TEXT: 1}, "text": json.dumps({_TEXT: 1})}
# A repr of an object, a part as a whole, or JSON in JSON.
_IS_WRONG = re.compile(r"""\{'Qz7'|['"]text\\*['"]: *\\*['"]Qz7|\\"Qz7""")


class TemplateForms:
    """Of one template. Can be pickled."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._known: dict[str, str | None] = {}

    def usual_role(self, role: str) -> str | None:
        """The usual name of a role that has another one here; None where it may stay, as the template names it."""
        lower = role.strip().lower()
        usual = _OTHER_NAMES.get(lower, lower)
        if role in _ROLES or usual not in _ROLES:
            return None
        is_named = f"'{role}'" in self._template.source or f'"{role}"' in self._template.source
        # Without blocks, what the assistant says is found by its name.
        return None if is_named and (usual != "assistant" or self._template.marks_generation) else usual

    def adapted(self, message: Message) -> Message:
        """The message in the forms that the template wants."""
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
        """ "text", "parts" or "object"; None = either, or not known."""
        if of not in self._known:
            written = (
                {form: self._written("assistant", tool_calls=_calls(value)) for form, value in _ARGUMENTS.items()}
                if of == "arguments"
                else {form: self._written(of, content=value) for form, value in _FORMS.items()}
            )
            right = [form for form, text in written.items() if _TEXT in text and not _IS_WRONG.search(text)]
            self._known[of] = right[0] if len(right) == 1 else None
        return self._known[of]

    def _written(self, role: str, **keys: Any) -> str:
        """A conversation with such a message; "" where the template does not take it."""
        before: list[Message] = [] if role in ("system", "developer", "user") else [_USER]
        if role in ("tool", "function"):
            before.append({"role": "assistant", "content": "", "tool_calls": _calls({})})
            keys |= {"tool_call_id": "abcdefghi", "name": "f"}
        after = [_USER] if role in ("system", "developer") else []
        try:
            return self._template.render([*before, {"role": role, "content": "", **keys}, *after])
        except RecordProblem:
            return ""


def _calls(arguments: Any) -> list[dict[str, Any]]:
    # Mistral's templates want ids of nine letters and digits.
    return [{"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": arguments}}]


def _with_arguments(call: Any, form: str | None) -> Any:
    """The call with its arguments in that form, where they have the other one."""
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
