"""`read_metadata`: the index of a checkpoint's tensors, read without running what a stranger may have put into it.

torch writes `.metadata` as a pickle and reads it with plain `pickle.load`, which runs whatever the file asks for. Here
an unpickler makes the few classes that such an index consists of and refuses everything else by name, and the places
that it gives must lie inside the checkpoint's directory. Tensors themselves torch reads with `weights_only=True`.
"""

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from evenload.errors import ConfigError

METADATA_FILE = ".metadata"
_METADATA_CLASSES = frozenset(
    {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    }
)  # fmt: skip
_OTHER_CLASSES = frozenset(
    {
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("pathlib", "PosixPath"),
        ("pathlib._local", "PosixPath"),
    }
)


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str) -> Any:
        if module_name == "torch" and isinstance(getattr(torch, global_name, None), torch.dtype):
            return getattr(torch, global_name)
        is_metadata = module_name == "torch.distributed.checkpoint.metadata" and global_name in _METADATA_CLASSES
        if not is_metadata and (module_name, global_name) not in _OTHER_CLASSES:
            raise ConfigError(f"it asks for '{module_name}.{global_name}', which no index of tensors consists of")
        return super().find_class(module_name, global_name)


def read_metadata(path: Path) -> Metadata:
    """`ConfigError` where it is missing, damaged, or holds anything but an index of tensors in this directory."""
    try:
        with (path / METADATA_FILE).open("rb") as file:
            metadata = _IndexUnpickler(file).load()
        _check(metadata)
    except ConfigError as error:
        raise ConfigError(
            f"checkpoint {path} is not read: {METADATA_FILE} is no index of tensors, {error}. Evenload did not write "
            "it; remove this checkpoint, and do not trust where it comes from"
        ) from error
    except Exception as error:  # a damaged pickle raises almost anything
        raise ConfigError(
            f"checkpoint {path} cannot be read: {METADATA_FILE} is missing or damaged ({type(error).__name__}: "
            f"{error}); remove this checkpoint to go on from the one before"
        ) from error
    return metadata


def _check(metadata: Any) -> None:
    if not isinstance(metadata, Metadata):
        raise ConfigError(f"it holds a {type(metadata).__name__}")
    for place in (metadata.storage_data or {}).values():
        name = place.relative_path
        if not isinstance(name, str) or Path(name).name != name:
            raise ConfigError(f"it names the file '{name}' outside of the checkpoint")


class CheckedReader(FileSystemReader):
    """torch's reader of tensors, with an index that `read_metadata` has read."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        super().__init__(path)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._metadata.storage_meta is None:
            self._metadata.storage_meta = StorageMeta()
        self._metadata.storage_meta.load_id = self.load_id
        return self._metadata
