"""`read_messages`: a column's value as the list of messages that chat templates expect.

Keys without a value are left out, because Arrow gives every message all keys of all messages and templates ask
whether a key is there. Thoughts that data sets put under other names are also given under the names that templates
read. Both is what transformers' `apply_chat_template` does, so that training sees what inference will.
"""

from typing import Any

from evenload.data.encoding.document_encoder import RecordProblem

Message = dict[str, Any]

_THOUGHTS = ("reasoning_content", "thinking", "reasoning")


def read_messages(value: Any, column: str) -> list[Message]:
    """The messages, as new dictionaries.

    Raises:
        RecordProblem: not a list; a message without role, or without content and tool calls; content that is neither
            text nor parts of text.
    """
    if not isinstance(value, list | tuple):
        held = "nothing" if value is None else f"a value of type {type(value).__name__}"
        raise RecordProblem(f"column '{column}' holds {held} instead of a list of messages")
    return [_read_message(message, f"message {index} of '{column}'") for index, message in enumerate(value)]


def _read_message(value: Any, where: str) -> Message:
    if not isinstance(value, dict):
        raise RecordProblem(f"{where} is of type {type(value).__name__}, must be an object with role and content")
    message = {key: item for key, item in value.items() if item is not None}
    if not isinstance(message.get("role"), str):
        raise RecordProblem(
            f"{where} has no 'role' (it has {sorted(map(str, message))}); rename its keys to role, content"
        )
    content = message.get("content")
    if content is None:
        if not message.get("tool_calls"):
            raise RecordProblem(f"{where} (role '{message['role']}') has neither content nor tool_calls")
    elif isinstance(content, list | tuple):
        for part in content:
            if not isinstance(part, dict) or part.get("type") != "text":
                kind = part.get("type") if isinstance(part, dict) else type(part).__name__
                raise RecordProblem(f"{where} has a content part of type '{kind}'; only text can be trained")
    elif not isinstance(content, str):
        raise RecordProblem(
            f"{where} has content of type {type(content).__name__}, must be text or a list of text parts"
        )
    thoughts = next((message[key] for key in _THOUGHTS if key in message), None)
    if thoughts is not None:
        message = {"thinking": thoughts, **message, "reasoning_content": thoughts}
    return message
