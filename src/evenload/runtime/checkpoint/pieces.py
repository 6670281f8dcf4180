"""`TensorPieces`: tensors of a checkpoint by their whole shape, of which a rank holds some boxes; planners for them.

Optimizer state is cut twice: a tensor-parallel rank has a part of a matrix, and a data-parallel rank a range of
elements of the flat buffer of all its parts. A range of a row-major tensor is at most 2 * ndim - 1 boxes, so every
tensor is saved under its parameter's name in boxes of the whole tensor, which any layout can read (`DTensor` cannot say
that). Price: reading compares every pair of a wanted and a stored box of a tensor.

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
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from evenload.errors import ConfigError
from evenload.runtime.model.tensor_weights import TensorSplit

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


@dataclass(frozen=True, eq=False)
class Piece:
    """A box that begins at `offsets` of the whole tensor; `local` are its values, a view of live storage."""

    offsets: tuple[int, ...]
    local: Tensor


@dataclass(frozen=True, eq=False)
class TensorPieces:
    """One tensor of the checkpoint, of this whole shape, as this rank holds it. Every replica may hold the same pieces,
    so that one of them writes; or another rank writes them."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    is_replicated: bool = False
    is_written_elsewhere: bool = False

    @property
    def num_bytes(self) -> int:
        return sum(piece.local.nbytes for piece in self.pieces)


def whole_tensor(tensor: Tensor) -> TensorPieces:
    return TensorPieces(tuple(tensor.shape), (Piece((0,) * tensor.ndim, tensor),))


def pieces_of_range(
    values: Tensor, first: int, local_shape: Sequence[int], split: TensorSplit | None
) -> tuple[tuple[int, ...], tuple[Piece, ...]]:
    """Return a whole tensor's shape and, as boxes, elements `[first, first + n)` of this rank's part of it."""
    shape, base = list(local_shape), [0] * len(local_shape)
    if split is not None:
        shape[split.dim], base[split.dim] = split.whole_size, split.start
    pieces, row = [], 0
    for offsets, sizes in _boxes(tuple(local_shape), first, first + values.numel()):
        count = math.prod(sizes)
        at = tuple(a + b for a, b in zip(base, offsets, strict=True))
        pieces.append(Piece(at, values[row : row + count].view(sizes)))
        row += count
    return tuple(shape), tuple(pieces)


def _boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(offsets, sizes) of the boxes of row-major elements `[start, stop)`, in their order."""
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
    """Saves `TensorPieces` by name."""

    state_dict: Mapping[str, TensorPieces]  # type: ignore[bad-override-mutable-attribute]

    def set_up_planner(
        self, state_dict: Mapping, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict, self.is_coordinator = state_dict, is_coordinator
        self.flatten_state_dict = False

    def create_local_plan(self) -> SavePlan:
        items = []
        for name, tensor in self.state_dict.items():
            for index, piece in enumerate(tensor.pieces):
                data = TensorWriteData(
                    chunk=ChunkStorageMetadata(torch.Size(piece.offsets), piece.local.shape),
                    properties=TensorProperties.create_from_tensor(piece.local),
                    size=torch.Size(tensor.shape),
                )
                at = MetadataIndex(name, torch.Size(piece.offsets), index)
                items.append(WriteItem(index=at, type=WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return _find(self.state_dict, index)


class PieceLoadPlanner(DefaultLoadPlanner):
    """Fills `TensorPieces` by name, whatever boxes were saved."""

    state_dict: Mapping[str, TensorPieces]  # type: ignore[bad-override-mutable-attribute]

    def set_up_planner(
        self, state_dict: Mapping, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        """`ValueError` where a tensor is not there, or has another shape."""
        assert self.metadata is not None
        items = []
        for name, tensor in self.state_dict.items():
            stored = self.metadata.state_dict_metadata.get(name)
            if not isinstance(stored, TensorStorageMetadata):
                raise ValueError(f"it has no tensor '{name}'")
            if tuple(stored.size) != tensor.shape:
                raise ValueError(f"'{name}' has shape {tuple(stored.size)} there, the model needs {tensor.shape}")
            for index, piece in enumerate(tensor.pieces):
                items += _reads(MetadataIndex(name, torch.Size(piece.offsets), index), piece, stored.chunks)
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return _find(self.state_dict, index)


def _find(tensors: Mapping[str, TensorPieces], index: MetadataIndex) -> Tensor:
    # The planners' number of a piece is a hint that torch renumbers; where it begins is its name.
    found = (piece.local for piece in tensors[index.fqn].pieces if piece.offsets == tuple(index.offset or ()))
    return next(found)


def _reads(into: MetadataIndex, piece: Piece, chunks: Sequence[ChunkStorageMetadata]) -> Iterator[ReadItem]:
    """What of each stored box belongs into a piece."""
    for number, chunk in enumerate(chunks):
        shared = overlap(piece.offsets, piece.local.shape, chunk.offsets, chunk.sizes)
        if shared is None:
            continue
        low, lengths = shared
        yield ReadItem(
            type=LoadItemType.TENSOR,
            dest_index=into,
            dest_offsets=torch.Size(at - a for at, a in zip(low, piece.offsets, strict=True)),
            storage_index=MetadataIndex(into.fqn, chunk.offsets, number),
            storage_offsets=torch.Size(at - b for at, b in zip(low, chunk.offsets, strict=True)),
            lengths=torch.Size(lengths),
        )


def overlap(
    offsets: Sequence[int], sizes: Sequence[int], other_offsets: Sequence[int], other_sizes: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Where the common part of two boxes of a tensor begins, and its sizes; None = they have none."""
    low = tuple(max(a, b) for a, b in zip(offsets, other_offsets, strict=True))
    ends = zip(offsets, sizes, other_offsets, other_sizes, strict=True)
    lengths = tuple(min(a + n, b + m) - at for at, (a, n, b, m) in zip(low, ends, strict=True))
    return None if min(lengths, default=1) <= 0 else (low, lengths)
