"""`DataConfig` from what people have in their hands: a path, a configuration, a Hugging Face data set.

What is refused here would otherwise be a surprise later: options of other loaders that have no meaning here, a document
limit above a pack's, an evaluation that would leave something out.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evenload.data.config import DataConfig
from evenload.data.hf_dataset import is_iterable_dataset
from evenload.errors import ConfigError
from evenload.types.nearest_name import did_you_mean

DATASET_NAME = "dataset"
"""Source name of a data set object."""

_KNOWN_ELSEWHERE = {
    "packing": "packing is what this loader does; leave it out",
    "packing_strategy": "it is called strategy here",
    "padding_free": "packs are always free of padding, but for strategy padded; leave it out",
    "sample_packing": "packing is what this loader does; leave it out",
    "neat_packing": "documents never attend to each other; leave it out",
    "max_length": "it is called max_tokens here",
    "max_seq_length": "it is called max_tokens here",
    "sequence_len": "it is called max_tokens here",
    "cutoff_len": "it is called max_tokens here; what happens to longer documents is overlong",
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
# Kinds of records, by the columns that tell them.
_TOLD_BY = {
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
    data: Any, settings: Mapping[str, Any], *, max_tokens: int, default_batch_tokens: int, evaluation: bool
) -> tuple[DataConfig, dict[str, Any]]:
    """Data settings, and the data set objects they name.

    Args:
        data: see `PackedLoader`.
        settings: fields of `DataConfig`; those of a configuration are replaced.
        default_batch_tokens: size of a batch in evaluation, where none is set.
        evaluation: everything once, in order.

    Raises:
        ConfigError: unknown or contradicting settings; a data set without a column that says what a record is.
    """
    settings = dict(settings)
    _check_names(settings)
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
    every: dict[str, Any] = base | settings
    return DataConfig(**every), datasets


def _check_names(settings: Mapping[str, Any]) -> None:
    for name in settings:
        if name in DataConfig.__struct_fields__:
            continue
        if name in _KNOWN_ELSEWHERE:
            raise ConfigError(f"PackedLoader has no '{name}': {_KNOWN_ELSEWHERE[name]}")
        hint = did_you_mean(name, DataConfig.__struct_fields__)
        raise ConfigError(
            f"PackedLoader has no '{name}'; {hint}it takes its own arguments and the fields of DataConfig"
        )


def _record_kind(data: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What a data set's records hold, by its columns, where the caller does not say."""
    if "record" in settings or data.column_names is None:
        return {}
    columns = set(data.column_names)
    found = [kind for kind, needed in _TOLD_BY.items() if needed <= columns]
    if len(found) == 1:
        return {"record": found[0]}
    kinds = ", ".join(found) or "none of the kinds"
    raise ConfigError(
        f"the data set's columns {sorted(columns)} could be records of {kinds}; set record to one of text, messages, "
        "prompt_completion, tokens, and the names of its columns where they are others"
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
