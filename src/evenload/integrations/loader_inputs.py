"""What a `PackedLoader` reads: data (a path, a configuration or a Hugging Face data set) and a tokeniser.

A fast tokeniser of transformers is written to a temporary directory and read back as `tokenizer.json`, so content, end
of document and chat template are those that transformers would load. Options of other loaders are refused by the name
that they have here.
"""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from evenload.data.config import DataConfig, trains_given_ids
from evenload.data.hf_dataset import is_iterable_dataset
from evenload.data.tokenize import BYTES, MAX_BYTE_VOCABULARY, DocumentTokenizer, describe_tokenizer
from evenload.errors import ConfigError
from evenload.types.base import did_you_mean

DATASET_NAME = "dataset"
"""Source name of a data set object."""

_KNOWN_ELSEWHERE = {
    **dict.fromkeys(("packing", "sample_packing"), "packing is what this loader does; leave it out"),
    "packing_strategy": "it is called strategy here",
    "padding_free": "packs are always free of padding, but for strategy padded; leave it out",
    "neat_packing": "documents never attend to each other; leave it out",
    **dict.fromkeys(("max_length", "max_seq_length", "sequence_len", "cutoff_len"), "it is called max_tokens here"),
    "batch_size": "a step is batch_documents or batch_tokens, over all ranks",
    "num_workers": "it is called workers here",
    "prefetch_factor": "it is called prefetch_steps here",
    "drop_last": "nothing is dropped: the last batch is short",
    "shuffle": "set shuffle_window; 1 keeps the order",
    "collate_fn": "set format",
    "completion_only_loss": 'set loss_on = "completion"',
    "assistant_only_loss": 'set record = "messages" and loss_on = "completion"',
    "dataset_text_field": "it is called text_column here",
}
# Kinds of records, by the columns that identify them.
_KIND_COLUMNS = {
    "tokens": {"input_ids"},
    "messages": {"messages"},
    "prompt_completion": {"prompt", "completion"},
    "text": {"text"},
}
_EVALUATION_REFUSES = {
    "shuffle_window": (1,),
    "epochs": (None,),
    "overlong": ("error", "split"),
    "on_corrupt": ("error",),
    "mixture_end": ("once",),
}


def data_config(
    data: Any, settings: dict[str, Any], *, max_tokens: int, default_batch_tokens: int, evaluation: bool
) -> tuple[DataConfig, dict[str, Any]]:
    """Return the data settings, and the data set objects that they name.

    Args:
        data: see `PackedLoader`.
        settings: fields of `DataConfig`; those of a configuration are replaced.
        default_batch_tokens: size of a batch in evaluation, where none is set.
        evaluation: everything once, in order.

    Raises:
        ConfigError: unknown or contradicting settings; a data set whose columns do not show what a record is.
    """
    for name in settings:
        if name in _KNOWN_ELSEWHERE:
            raise ConfigError(f"PackedLoader has no '{name}': {_KNOWN_ELSEWHERE[name]}")
        if name not in DataConfig.__struct_fields__:
            hint = did_you_mean(name, DataConfig.__struct_fields__)
            raise ConfigError(f"PackedLoader has no '{name}'; {hint}its settings are LoaderOptions and DataConfig")
    base: dict[str, Any] = {"max_document_tokens": max_tokens}
    datasets: dict[str, Any] = {}
    if isinstance(data, DataConfig):
        base = {field: getattr(data, field) for field in data.__struct_fields__}
        for one, other in (("batch_documents", "batch_tokens"), ("batch_tokens", "batch_documents")):
            if settings.get(one) is not None:
                base[other] = None
    elif any(kind.__module__.startswith("datasets.") for kind in type(data).__mro__):
        is_iterable_dataset(data)  # refuses what is neither kind, such as a dictionary of splits
        base |= {"sources": (DATASET_NAME,)} | _record_kind(data, settings)
        datasets = {DATASET_NAME: data}
    elif isinstance(data, str | Path):
        base["sources"] = (str(data),)
    elif isinstance(data, Sequence) and all(isinstance(source, str | Path) for source in data):
        base["sources"] = tuple(str(source) for source in data)
    else:
        raise ConfigError(
            f"data is a {type(data).__name__}; give a path or URL, a list of them, a DataConfig, or a Hugging Face "
            "Dataset or IterableDataset"
        )
    if evaluation:
        base |= _evaluation(data, base | settings, settings, default_batch_tokens)
    return DataConfig(**(base | settings)), datasets


def _record_kind(data: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    if "record" in settings or data.column_names is None:
        return {}
    columns = set(data.column_names)
    found = [kind for kind, needed in _KIND_COLUMNS.items() if needed <= columns]
    if len(found) == 1:
        return {"record": found[0]}
    kinds = ", ".join(found) or "none of the kinds"
    raise ConfigError(
        f"the data set's columns {sorted(columns)} could be records of {kinds}; set record to one of "
        f"{', '.join(_KIND_COLUMNS)}, and the names of its columns where they are others"
    )


def _evaluation(
    data: Any, given: Mapping[str, Any], settings: Mapping[str, Any], default_batch_tokens: int
) -> dict[str, Any]:
    for name, allowed in _EVALUATION_REFUSES.items():
        # The order and the epochs of a configuration are those of training; what it would leave out is meant.
        meant = isinstance(data, DataConfig) and name in ("overlong", "on_corrupt", "mixture_end")
        if (name in settings or meant) and given[name] not in allowed:
            raise ConfigError(
                f"evaluation=True with {name} = {given[name]!r}; evaluation leaves nothing out and keeps the order, so "
                f"it must be {' or '.join(map(repr, allowed))}"
            )
    fixed: dict[str, Any] = {"shuffle_window": 1, "streams": None, "epochs": None}
    if given.get("batch_documents") is None and given.get("batch_tokens") is None:
        fixed["batch_tokens"] = default_batch_tokens
    return fixed


@contextmanager
def tokenizer_settings(config: DataConfig, tokenizer: Any) -> Iterator[tuple[DataConfig, DocumentTokenizer | None]]:
    """Yield data settings that name the tokeniser, and the tokeniser where settings cannot name it.

    Args:
        tokenizer: None = the one that the settings name; a path or "bytes"; a `DocumentTokenizer`; a fast tokeniser of
            transformers, whose files exist inside the `with` block only.

    Raises:
        ConfigError: a slow tokeniser, or something else.
    """
    if tokenizer is None:
        yield config, None
    elif isinstance(tokenizer, str | Path):
        yield msgspec.structs.replace(config, tokenizer=str(tokenizer)), None
    elif all(hasattr(tokenizer, name) for name in ("encode_with_offsets", "encode_batch", "eos_id")):
        yield config, tokenizer
    elif hasattr(tokenizer, "save_pretrained"):
        if getattr(tokenizer, "backend_tokenizer", None) is None:
            raise ConfigError(
                f"tokenizer {type(tokenizer).__name__} is a slow one, without a tokenizer.json; load it with "
                "use_fast=True, or convert it once and give the path"
            )
        with tempfile.TemporaryDirectory() as directory:
            tokenizer.save_pretrained(directory)
            yield msgspec.structs.replace(config, tokenizer=directory), None
    else:
        raise ConfigError(
            f'tokenizer is a {type(tokenizer).__name__}; give "bytes", a tokenizer.json or its directory, a fast '
            "tokeniser of transformers, or a DocumentTokenizer"
        )


def require_choice(config: DataConfig, tokenizer: Any, vocab_size: int | None) -> None:
    """Refuse plain bytes that nobody chose, where the caller's model has another vocabulary: a `ConfigError`."""
    if tokenizer is not None or config.tokenizer is not None or vocab_size is None or trains_given_ids(config):
        return
    if vocab_size > MAX_BYTE_VOCABULARY:
        raise ConfigError(
            f"tokenizer is not given, and the model's vocabulary of {vocab_size:,} ids is not one of bytes; give the "
            f'model\'s tokeniser or its directory, or give tokenizer="{BYTES}" to train a model from scratch on bytes'
        )


def tokenizer_fact(config: DataConfig, given: Any, opened: DocumentTokenizer, vocab_size: int | None) -> str:
    """Describe the tokeniser in use (`opened`) for the log, and whether the caller chose it."""
    if trains_given_ids(config):
        checked = "not checked, as the model is not known" if vocab_size is None else f"checked: below {vocab_size:,}"
        return f"none: records hold token ids, {checked}"
    chosen = ", because none was given" if given is None and config.tokenizer is None else ""
    is_loaded = hasattr(given, "save_pretrained")
    origin = str(getattr(given, "name_or_path", "") or type(given).__name__) if is_loaded else ""
    return describe_tokenizer(opened, origin) + chosen
