"""`open_reader`: the reader of a file by its format; `dataset_file`: a data set handed over, as a file."""

from typing import Any

from fsspec.implementations.local import LocalFileSystem

from evenload.data.config import DataConfig
from evenload.data.formats.arrow import ArrowReader
from evenload.data.formats.columns import record_columns
from evenload.data.formats.hf_dataset import DatasetReader, IterableDatasetReader, dataset_bytes, is_iterable_dataset
from evenload.data.formats.jsonl import JsonlReader, JsonReader
from evenload.data.formats.parquet import ParquetReader
from evenload.data.formats.record import RecordReader
from evenload.data.formats.text import TextReader
from evenload.data.formats.token_files import MegatronReader, NpyReader
from evenload.data.source.files import SourceFile
from evenload.errors import ConfigError

_OWN_COMPRESSION = ("parquet", "arrow", "memmap")


def open_reader(file: SourceFile, config: DataConfig, dataset: Any = None) -> RecordReader:
    """The reader of a file. Opens nothing; can be pickled.

    Args:
        config: names the columns and what they hold (`record`).
        dataset: what `file` stands for, where its format is "dataset".

    Raises:
        ConfigError: a format that cannot hold such records, or not inside that compression.
    """
    if file.format in _OWN_COMPRESSION and file.compression is not None:
        raise ConfigError(
            f"{file.name} is a {file.format} file inside {file.compression}, of which no part can be read alone; "
            "decompress it"
        )
    columns = record_columns(config)
    match file.format:
        case "text":
            _check_record(file, config, "text", "set data.format or data.include")
            return TextReader()
        case "jsonl":
            return JsonlReader(columns)
        case "json":
            return JsonReader(columns)
        case "parquet":
            return ParquetReader(columns)
        case "arrow":
            return ArrowReader(columns)
        case "memmap":
            _check_record(file, config, "tokens", 'set data.record = "tokens"')
            for setting in ("labels_column", "mask_column"):
                if column := getattr(config, setting):
                    raise ConfigError(
                        f"{file.name} is a token file, which holds nothing but ids, and data.{setting} is '{column}'; "
                        "leave it out"
                    )
            return NpyReader(config.document_end_id) if file.path.endswith(".npy") else MegatronReader()
        case "dataset":
            reader = IterableDatasetReader if is_iterable_dataset(dataset) else DatasetReader
            return reader(dataset, columns)


def dataset_file(dataset: Any, name: str = "dataset") -> SourceFile:
    """What stands for a Hugging Face data set among the files; messages call it by the name."""
    size_bytes, rows = None, ""
    if not is_iterable_dataset(dataset):
        size_bytes, rows = dataset_bytes(dataset), f" of {len(dataset)} rows"
    return SourceFile(
        name=name,
        path="",
        key=f"0:{name}{rows}",
        size_bytes=size_bytes,
        format="dataset",
        compression=None,
        filesystem=LocalFileSystem(),
    )


def _check_record(file: SourceFile, config: DataConfig, holds: str, fix: str) -> None:
    if config.record != holds:
        raise ConfigError(
            f'{file.name} is read as {file.format}, which holds records of kind "{holds}", and data.record is '
            f'"{config.record}"; {fix}'
        )
