"""`TemplateForms`: in which form a chat template wants what data sets write in several.

Content of a message is text or a list of parts of text; arguments of a tool call are an object, or the same as JSON text
(OpenAI's form). A template that expects the other form writes it wrong without an error: parts as a Python repr, JSON
text encoded once more, text that it walks through as if it were parts as nothing. So a short conversation is rendered
in both forms, once a template, role and form, and where one of them comes out right and the other does not, messages
are given in that one. Where both do, or none, a message stays as it is.
"""

import json
import re
from typing import Any

from evenload.data.encoding.chat_template import ChatTemplate, Message
from evenload.data.encoding.document_encoder import RecordProblem

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_OTHER_NAMES = {"human": "user", "gpt": "assistant", "bot": "assistant", "chatbot": "assistant", "model": "assistant"}
_TEXT = "Qz7"
_PARTS = [{"type": "text", "text": _TEXT}]
_USER = {"role": "user", "content": "q"}
# Python's repr of what was given, or JSON that holds JSON.
_IS_REPR, _IS_PARTS, _IS_TWICE = (
    re.compile(form) for form in (r"\{'Qz7'", r"""['"]text\\*['"]: *\\*['"]Qz7""", r'\\"Qz7')
)


class TemplateForms:
    """Of one template. Can be pickled."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._known: dict[str, str | None] = {}

    def usual_role(self, role: str) -> str | None:
        """The name of a role that the template does not know by this one; None where it may stay."""
        lower = role.strip().lower()
        usual = _OTHER_NAMES.get(lower, lower)
        if role in _ROLES or usual not in _ROLES:
            return None
        # Where blocks say what the assistant says, its name is the template's affair.
        is_known = re.search(f"[\"']{re.escape(role)}[\"']", self._template.source) is not None
        return None if is_known and (usual != "assistant" or self._template.marks_generation) else usual

    def adapted(self, message: Message) -> Message:
        """The message in the forms that the template wants."""
        content, calls = message.get("content"), message.get("tool_calls")
        changed: Message = {}
        if content is not None:
            form = self._form(message["role"])
            if form == "text" and not isinstance(content, str):
                changed["content"] = "".join(part["text"] for part in content)
            elif form == "parts" and isinstance(content, str):
                changed["content"] = [{"type": "text", "text": content}]
        if isinstance(calls, list | tuple) and calls:
            changed["tool_calls"] = [_with_arguments(call, self._form("arguments")) for call in calls]
        return message | changed

    def _form(self, of: str) -> str | None:
        """ "text", "parts" or "object"; None = either, or not known."""
        if of not in self._known:
            if of == "arguments":
                forms = {"object": {_TEXT: 1}, "text": json.dumps({_TEXT: 1})}
                written = {
                    form: self._written("assistant", tool_calls=[_call(arguments=forms[form])]) for form in forms
                }
            else:
                forms = {"parts": _PARTS, "text": _TEXT}
                written = {form: self._written(of, content=forms[form]) for form in forms}
            right = [
                form
                for form, text in written.items()
                if _TEXT in text and not any(wrong.search(text) for wrong in (_IS_REPR, _IS_PARTS, _IS_TWICE))
            ]
            self._known[of] = right[0] if len(right) == 1 else None
        return self._known[of]

    def _written(self, role: str, **keys: Any) -> str:
        """A conversation with such a message; "" where the template does not take it."""
        before = [] if role in ("system", "developer", "user") else [_USER]
        if role in ("tool", "function"):
            before.append({"role": "assistant", "content": "", "tool_calls": [_call(arguments={})]})
            keys |= {"tool_call_id": _call()["id"], "name": "f"}
        after = [_USER] if role in ("system", "developer") else []
        try:
            return self._template.render([*before, {"role": role, "content": "", **keys}, *after])
        except RecordProblem:
            return ""


def _call(**keys: Any) -> dict[str, Any]:
    # Mistral's templates want ids of nine letters and digits.
    return {"id": "abcdefghi", "type": "function", "function": {"name": "f", **keys}}


def _with_arguments(call: Any, form: str | None) -> Any:
    """The call with its arguments in that form, where they have the other one."""
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return call | {"function": _with_arguments(call["function"], form)}
    arguments = call.get("arguments")
    if form == "text" and isinstance(arguments, dict):
        return call | {"arguments": json.dumps(arguments, ensure_ascii=False)}
    if form == "object" and isinstance(arguments, str):
        try:
            decoded = json.loads(arguments)
        except ValueError:
            return call
        return call | {"arguments": decoded} if isinstance(decoded, dict) else call
    return call
