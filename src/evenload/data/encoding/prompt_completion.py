"""Record kind "prompt_completion": two strings, or two lists of messages; loss on the completion.

Strings are joined as they are and tokenised together, so the tokens are those of the joined text. The border between
them is exact in characters; a token that begins in the prompt counts as prompt (`text_encoder`). The end-of-document
token follows, unless the completion ends with it already, as TRL has it.

Lists of messages are one conversation through the chat template, which writes its own end, and labels are those that
record kind "messages" gives the completion's messages: what the assistant says. TRL trains all of the completion, so
also what tools answer and users ask in it, and two kinds of records of one conversation would teach different things.
"""

from collections.abc import Collection
from typing import Any

from evenload.data.encoding.chat_template import ChatTemplate
from evenload.data.encoding.chats import read_messages, render_chat
from evenload.data.encoding.document_encoder import RecordProblem
from evenload.data.encoding.template_forms import TemplateForms
from evenload.data.encoding.text_encoder import RenderedText, check_text


class PromptCompletion:
    """`Renderer` of kind "prompt_completion".

    Args:
        template: for lists of messages; a string says why there is none.
        has_spans: loss on the completion only; else on every token after the first.
        columns, ignored: as of `Chats`, after the columns of prompt and completion.
    """

    def __init__(
        self, columns: tuple[str, ...], template: ChatTemplate | str, has_spans: bool, ignored: Collection[str] = ()
    ) -> None:
        self.columns, self._ignored = columns, frozenset(ignored)
        loss = "completion's assistant" if has_spans else "all"
        known = template.name if isinstance(template, ChatTemplate) else None
        passed_over = f", passed over {sorted(ignored)}" if ignored else ""
        self.name = f"prompt and completion of {columns}, loss on {loss}, template {known}{passed_over}"
        self._has_spans, self._template = has_spans, template
        self._forms = TemplateForms(template) if isinstance(template, ChatTemplate) else None

    def render(self, values: tuple[Any, ...]) -> RenderedText:
        (prompt, completion), beside = values[:2], dict(zip(self.columns[2:], values[2:], strict=False))
        if isinstance(prompt, list | tuple) or isinstance(completion, list | tuple):
            return self._render_messages(prompt, completion, beside)
        if beside.get("tools"):
            raise RecordProblem("the record has tools, and its prompt is a text, which no template puts them into")
        prompt = check_text(prompt, self.columns[0])
        whole = prompt + check_text(completion, self.columns[1])
        return RenderedText(whole, ((len(prompt), len(whole)),) if self._has_spans else None, is_bare=True)

    def _render_messages(self, prompt: Any, completion: Any, beside: dict[str, Any]) -> RenderedText:
        if isinstance(self._template, str) or self._forms is None:
            raise RecordProblem(self._template)
        prompt_column, completion_column = self.columns[:2]
        before = read_messages(prompt, prompt_column, self._forms)
        after = read_messages(completion, completion_column, self._forms)
        if not before or not after:
            empty = completion_column if before else prompt_column
            raise RecordProblem(f"column '{empty}' holds no message; a prompt and a completion need at least one each")
        if before[-1]["role"] == after[0]["role"] == "assistant":
            raise RecordProblem(
                f"the last message of '{prompt_column}' is the assistant's, and '{completion_column}' goes on with "
                f"one of its; move it to '{completion_column}'"
            )
        first = len(before) if self._has_spans else None
        return render_chat(self._template.for_record(**beside), [*before, *after], first, self._ignored)
