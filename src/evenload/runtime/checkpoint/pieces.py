"""`TensorPieces`: tensors of a checkpoint by their whole shape, of which a rank holds some boxes; planners for them.

Optimizer state is cut twice: a tensor-parallel rank has a part of a matrix, or of every section of it, and a
data-parallel rank a range of elements of the flat buffer of all its parts. A range of a row-major tensor is at most
2 * ndim - 1 boxes, each cut where a section ends, so every tensor is saved under its parameter's name in boxes of the
whole tensor, which any layout can read.

`.metadata` is a pickle, which torch reads with plain `pickle.load`: whatever the file names is run. `read_metadata`
makes only the few classes that such an index consists of, and refuses files outside of the checkpoint's directory.
"""

import math
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from evenload.errors import ConfigError
from evenload.runtime.model.tensor_weights import TensorSplit

METADATA_FILE = ".metadata"
_METADATA_CLASSES = (
    "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
    "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
)  # fmt: skip
_CLASSES = {
    *(f"torch.distributed.checkpoint.metadata.{name}" for name in _METADATA_CLASSES),
    *("torch.Size", "torch.serialization._get_layout", "torch.distributed.checkpoint.filesystem._StorageInfo"),
    *("pathlib.PosixPath", "pathlib._local.PosixPath"),
}


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str) -> Any:
        if module_name == "torch" and isinstance(getattr(torch, global_name, None), torch.dtype):
            return getattr(torch, global_name)
        if f"{module_name}.{global_name}" not in _CLASSES:
            raise ConfigError(f"it asks for '{module_name}.{global_name}', which no index of tensors consists of")
        return super().find_class(module_name, global_name)


def read_metadata(path: Path) -> Metadata:
    """Read a checkpoint's index of tensors. `ConfigError` where it is missing, damaged, or holds anything else."""
    try:
        with (path / METADATA_FILE).open("rb") as file:
            metadata = _IndexUnpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise ConfigError(f"it holds a {type(metadata).__name__}")
        for place in (metadata.storage_data or {}).values():
            name = place.relative_path
            if not isinstance(name, str) or Path(name).name != name:
                raise ConfigError(f"it names the file '{name}' outside of the checkpoint")
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


class SafeIndexReader(FileSystemReader):
    """torch's reader of tensors, with an index that `read_metadata` has read."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        super().__init__(path)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._metadata.storage_meta is None:
            self._metadata.storage_meta = StorageMeta()
        self._metadata.storage_meta.load_id = self.load_id
        return self._metadata


@dataclass(frozen=True, eq=False)
class TensorPieces:
    """One tensor of the checkpoint as this rank holds it.

    Args:
        shape: of the whole tensor.
        pieces: boxes by their offsets in the whole tensor; views of live storage.
        is_replicated: every replica holds these pieces, so that one of them writes.
        is_written_elsewhere: another rank writes them.
    """

    shape: tuple[int, ...]
    pieces: Mapping[tuple[int, ...], Tensor]
    is_replicated: bool = False
    is_written_elsewhere: bool = False

    @property
    def num_bytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces.values())

    @property
    def chunks(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(at), piece.shape) for at, piece in self.pieces.items()]


def whole_tensor(tensor: Tensor) -> TensorPieces:
    return TensorPieces(tuple(tensor.shape), {(0,) * tensor.ndim: tensor})


def pieces_of_range(
    values: Tensor, first: int, local_shape: Sequence[int], split: TensorSplit | None, **flags: bool
) -> TensorPieces:
    """Return elements `[first, first + n)` of this rank's part of a tensor as boxes of the whole tensor."""
    shape = list(local_shape)
    if split is not None:
        shape[split.dim] = sum(split.sections)
    pieces, row = {}, 0
    for offsets, sizes in _boxes(tuple(local_shape), first, first + values.numel()):
        count = math.prod(sizes)
        box = values[row : row + count].view(sizes)
        row += count
        if split is None:
            pieces[offsets] = box
            continue
        for at, part in split.placed(offsets[split.dim], box):
            pieces[*offsets[: split.dim], at, *offsets[split.dim + 1 :]] = part
    return TensorPieces(tuple(shape), pieces, **flags)


def _boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield (offsets, sizes) of the boxes of row-major elements `[start, stop)`, in their order."""
    if start >= stop:
        return
    if len(shape) == 1:
        yield (start,), (stop - start,)
        return
    inner = math.prod(shape[1:])
    (row, begin), (last, end) = divmod(start, inner), divmod(stop, inner)
    if begin:
        for offsets, sizes in _boxes(shape[1:], begin, inner if row < last else end):
            yield (row, *offsets), (1, *sizes)
        row += 1
    if row < last:
        yield (row, *(0 for _ in shape[1:])), (last - row, *shape[1:])
    if row <= last:
        for offsets, sizes in _boxes(shape[1:], 0, end):
            yield (last, *offsets), (1, *sizes)


class PieceSavePlanner(DefaultSavePlanner):
    """Saves `TensorPieces` by name; make it with `flatten_state_dict` and `flatten_sharded_tensors` off."""

    state_dict: Mapping[str, TensorPieces]  # type: ignore[bad-override-mutable-attribute]

    def create_local_plan(self) -> SavePlan:
        items = []
        for name, tensor in self.state_dict.items():
            for index, (chunk, piece) in enumerate(zip(tensor.chunks, tensor.pieces.values(), strict=True)):
                properties = TensorProperties.create_from_tensor(piece)
                data = TensorWriteData(chunk=chunk, properties=properties, size=torch.Size(tensor.shape))
                at = MetadataIndex(name, chunk.offsets, index)
                items.append(WriteItem(index=at, type=WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return _piece(self.state_dict, index)


class PieceLoadPlanner(DefaultLoadPlanner):
    """Fills `TensorPieces` by name, whatever boxes were saved."""

    state_dict: Mapping[str, TensorPieces]  # type: ignore[bad-override-mutable-attribute]

    def set_up_planner(
        self, state_dict: Mapping, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        """Plan reads of every piece; `ValueError` where a tensor is not there, or has another shape."""
        assert self.metadata is not None
        items = []
        for name, tensor in self.state_dict.items():
            stored = self.metadata.state_dict_metadata.get(name)
            if not isinstance(stored, TensorStorageMetadata):
                raise ValueError(f"it has no tensor '{name}'")
            if tuple(stored.size) != tensor.shape:
                raise ValueError(f"'{name}' has shape {tuple(stored.size)} there, the model needs {tensor.shape}")
            items += create_read_items_for_chunk_list(name, stored, tensor.chunks)
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return _piece(self.state_dict, index)


def _piece(tensors: Mapping[str, TensorPieces], index: MetadataIndex) -> Tensor:
    # The planners' number of a piece is a hint that torch renumbers; where it begins is its name.
    return tensors[index.fqn].pieces[tuple(index.offset or ())]
