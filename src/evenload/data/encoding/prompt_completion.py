"""Record kind "prompt_completion": two strings, or two lists of messages; loss on the completion.

Strings are joined as they are and tokenised together, so the tokens are those of the joined text. The border between
them is exact in characters; a token that begins in the prompt counts as prompt (`text_encoder`). The end-of-document
token follows, unless the completion ends with it already, as TRL has it. Lists of messages go through the chat
template, which writes its own end; the completion is everything after the prompt's generation prompt.
"""

from typing import Any

from evenload.data.encoding.chat_template import ChatTemplate
from evenload.data.encoding.chats import read_messages, render_prompt
from evenload.data.encoding.document_encoder import RecordProblem
from evenload.data.encoding.text_encoder import RenderedText, check_text


class PromptCompletion:
    """`Renderer` of kind "prompt_completion".

    Args:
        template: for lists of messages; a string says why there is none.
        has_spans: loss on the completion only; else on every token after the first.
    """

    counts_touching = False

    def __init__(
        self, prompt_column: str, completion_column: str, template: ChatTemplate | str, has_spans: bool
    ) -> None:
        self.columns: tuple[str, ...] = (prompt_column, completion_column)
        loss = "completion" if has_spans else "all"
        known = template.name if isinstance(template, ChatTemplate) else None
        self.name = f"prompt '{prompt_column}', completion '{completion_column}', loss on {loss}, template {known}"
        self._has_spans, self._template = has_spans, template

    def render(self, values: tuple[Any, ...]) -> RenderedText:
        prompt, completion = values
        if isinstance(prompt, list | tuple) or isinstance(completion, list | tuple):
            return self._render_messages(prompt, completion)
        prompt = check_text(prompt, self.columns[0])
        whole = prompt + check_text(completion, self.columns[1])
        return RenderedText(whole, self._spans(len(prompt), len(whole)), end="unless_there")

    def _render_messages(self, prompt: Any, completion: Any) -> RenderedText:
        if isinstance(self._template, str):
            raise RecordProblem(self._template)
        prompt_column, completion_column = self.columns
        before, after = read_messages(prompt, prompt_column), read_messages(completion, completion_column)
        if not before or not after:
            empty = completion_column if before else prompt_column
            raise RecordProblem(f"column '{empty}' holds no message; a prompt and a completion need at least one each")
        if before[-1]["role"] == "assistant":
            raise RecordProblem(
                f"the last message of '{prompt_column}' is the assistant's; move it to '{completion_column}'"
            )
        whole = self._template.render([*before, *after])
        return RenderedText(whole, self._spans(len(render_prompt(self._template, before, whole)), len(whole)))

    def _spans(self, start: int, stop: int) -> tuple[tuple[int, int], ...] | None:
        return ((start, stop),) if self._has_spans else None
