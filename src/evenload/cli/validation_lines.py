"""What is shown of a pass over the validation data."""

from collections.abc import Sequence

from evenload.report.units import format_count, format_plain, format_seconds
from evenload.types.counted import counted
from evenload.types.validation import LossOf, Validation


def validation_lines(validation: Validation, *, shows_left_out: bool) -> list[str]:
    """One line, and one each by length and by source where there are several.

    Args:
        shows_left_out: what reading left out, too.
    """
    whole = validation.whole
    name = "validation of the average" if validation.of_average else "validation"
    lines = [
        f"{name} after step {validation.step} | loss {format_plain(whole.loss, '.4f')} | perplexity "
        f"{format_plain(whole.perplexity, '.4g')} | {counted(whole.documents, 'document')}, {whole.tokens:,} tokens in "
        f"{format_seconds(validation.seconds)} ({format_count(whole.tokens / max(validation.seconds, 1e-9))} tokens/s)"
    ]
    if len(validation.by_length) > 1:
        lines.append(f"  loss by length: {_losses(validation.by_length)}")
    if len(validation.by_source) > 1:
        lines.append(f"  loss by source: {_losses(validation.by_source)}")
    if shows_left_out:
        lines += [
            f"  left out of the validation data: {counted(documents, 'document')}, {tokens:,} tokens ({reason})"
            for reason, documents, tokens in validation.left_out
        ]
    return lines


def _losses(parts: Sequence[LossOf]) -> str:
    return ", ".join(f"{one.name} {format_plain(one.loss, '.4f')}" for one in parts)
