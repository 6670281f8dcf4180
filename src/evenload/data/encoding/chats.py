"""Record kind "messages": a conversation through a chat template, loss on what the assistant says.

Where the template has `{% generation %}` blocks, these are what the assistant says. Where it has none, the text of the
assistant's message i is found by rendering parts of the conversation:

    messages[:i], generation prompt   <|user|>Hi<|end|><|assistant|>
    messages[:i + 1]                  <|user|>Hi<|end|><|assistant|>Hello<|end|>
    all messages                      <|user|>Hi<|end|><|assistant|>Hello<|end|><|user|>Bye<|end|> ...
                                                                    ─────────── loss

This holds only if each rendering begins the next one, which is checked for every message. Templates that write
earlier turns differently once later ones follow (dropping thoughts, say) fail the check, and the record is refused.
A template without a generation prompt has the assistant's header in the loss.

Price: 2 renderings for each of the assistant's messages, so it grows with the square of the turns; 1 rendering with
`{% generation %}` blocks or loss on all tokens.
"""

from collections.abc import Sequence
from typing import Any

from evenload.data.encoding.chat_template import ChatTemplate
from evenload.data.encoding.conversation import Message, read_messages
from evenload.data.encoding.document_encoder import RecordProblem
from evenload.data.encoding.text_encoder import CharSpan, RenderedText

_FIX = 'use a template with {% generation %} blocks (data.chat_template), or set data.loss_on = "all"'


class Chats:
    """`Renderer` of kind "messages".

    Args:
        has_spans: loss on the assistant's messages only; else on every token after the first.
    """

    def __init__(self, column: str, template: ChatTemplate, has_spans: bool) -> None:
        self.columns: tuple[str, ...] = (column,)
        loss = "completion" if has_spans else "all"
        self.name = f"messages of '{column}', loss on {loss}, template {template.name}"
        self.has_spans, self.counts_touching = has_spans, template.marks_generation
        self._template = template

    def render(self, values: tuple[Any, ...]) -> RenderedText:
        template, messages = self._template, read_messages(values[0], self.columns[0])
        if not messages:
            return RenderedText("", () if self.has_spans else None)
        if not self.has_spans:
            return RenderedText(template.render(messages))
        if template.marks_generation:
            return RenderedText(*template.render_with_spans(messages))
        whole = template.render(messages)
        return RenderedText(whole, tuple(_assistant_spans(template, messages, whole)))


def render_prompt(template: ChatTemplate, messages: Sequence[Message], whole: str) -> str:
    """What a model is given before it answers to these messages, with which `whole`, all messages, must begin."""
    prompt = template.render(messages, add_generation_prompt=True)
    if not whole.startswith(prompt):
        raise RecordProblem(
            f"with chat template '{template.origin}' the prompt for message {len(messages)} is not how the whole "
            f"conversation begins, so what the assistant says cannot be told from the prompt; {_FIX}"
        )
    return prompt


def _assistant_spans(template: ChatTemplate, messages: Sequence[Message], whole: str) -> list[CharSpan]:
    spans: list[CharSpan] = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        if index == 0:
            raise RecordProblem(f"the conversation begins with the assistant, which no prompt comes before; {_FIX}")
        start = len(render_prompt(template, messages[:index], whole))
        is_last = index == len(messages) - 1
        upto = whole if is_last else template.render(messages[: index + 1])
        if not whole.startswith(upto):
            raise RecordProblem(
                f"chat template '{template.origin}' writes message {index} differently once other messages follow "
                f"(such as without its thoughts), so what the assistant says is not known; {_FIX}, or end the "
                "conversation there"
            )
        spans.append((start, len(upto)))
    return spans
