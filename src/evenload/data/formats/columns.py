"""`Column`: what the values of a column have to be, and how Python values become that."""

from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenload.data.config import DataConfig

ColumnKind = Literal["text", "messages", "text_or_messages", "tokens"]

_INT32 = np.iinfo(np.int32)
KIND_WORDS: dict[ColumnKind, str] = {
    "text": "text",
    "messages": "a list of message objects",
    "text_or_messages": "text or a list of message objects",
    "tokens": "a list of token ids",
}


class Column(NamedTuple):
    """A column that a run may read.

    Args:
        name: key (jsonl) or column.
        kind: "text" values are str; "messages" list[dict]; "tokens" int32[num_tokens].
        setting: name of the `DataConfig` field that holds `name`.
    """

    name: str
    kind: ColumnKind
    setting: str


def record_columns(config: DataConfig) -> tuple[Column, ...]:
    """The columns of a record of `config.record`, in the order of `DocumentEncoder.encode`'s values."""
    fields: dict[str, ColumnKind]
    match config.record:
        case "text":
            fields = {"text_column": "text"}
        case "messages":
            fields = {"messages_column": "messages"}
        case "prompt_completion":
            fields = {"prompt_column": "text_or_messages", "completion_column": "text_or_messages"}
        case "tokens":
            fields = {"tokens_column": "tokens"}
            if config.labels_column:
                fields["labels_column"] = "tokens"
    return tuple(Column(getattr(config, field), kind, f"data.{field}") for field, kind in fields.items())


class ValueProblem(ValueError):
    """A value that is not what its column has to hold."""


def convert_value(kind: ColumnKind, value: Any) -> Any:
    """One Python value as its column holds it; a `ValueProblem` for another type and ids that int32 cannot hold."""
    if kind == "tokens":
        return token_array(value)
    is_text = type(value) is str
    is_messages = isinstance(value, list) and all(isinstance(message, dict) for message in value)
    if not ((is_text and kind != "messages") or (is_messages and kind != "text")):
        raise ValueProblem(f"{_shown(value)} is not {KIND_WORDS[kind]}")
    return value


def token_array(value: Any) -> NDArray[np.int32]:
    """int32[num_tokens] of a list or array of integers; raises as `convert_value`."""
    try:
        array = np.asarray(value) if isinstance(value, list | tuple | np.ndarray) else None
    except (ValueError, OverflowError):
        array = None
    if array is not None and array.shape[:1] == (0,):
        return np.zeros(0, dtype=np.int32)
    if array is None or array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueProblem(f"{_shown(value)} is not {KIND_WORDS['tokens']}")
    narrowed, fits = narrow_ids(array)
    if fits is not None:
        raise ValueProblem(beyond_int32(array))
    return narrowed


def narrow_ids(values: NDArray[Any]) -> tuple[NDArray[np.int32], NDArray[np.bool_] | None]:
    """Numbers as int32 (not copied where they are), and which of them int32 holds exactly; None = all."""
    if values.dtype == np.int32:
        return values, None
    if values.dtype.kind in "iu" and (values.dtype.itemsize < 4 or not len(values)):
        return values.astype(np.int32), None
    if values.dtype.kind in "iu":
        if _INT32.min <= values.min() and values.max() <= _INT32.max:
            return values.astype(np.int32), None
        fits = (values >= _INT32.min) & (values <= _INT32.max)
    else:
        fits = np.isfinite(values) & (values == np.trunc(values)) & (np.abs(values) <= _INT32.max)
    narrowed = np.where(fits, values, 0).astype(np.int32)
    return narrowed, None if fits.all() else fits


def beyond_int32(values: NDArray[Any]) -> str:
    _, fits = narrow_ids(values)
    worst = values[~fits][0] if fits is not None else values[0]
    return f"token id {worst} is no whole number of at most 2**31 - 1"


def _shown(value: Any) -> str:
    """A value in an error message: its type, and where it is short, itself."""
    text = repr(value)
    return "null" if value is None else f"{type(value).__name__} {text if len(text) <= 40 else text[:37] + '...'}"
