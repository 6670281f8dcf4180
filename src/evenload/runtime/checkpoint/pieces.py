"""`TensorPieces`: tensors of a checkpoint by their whole shape, of which a rank holds some boxes; planners for them.

Optimizer state is cut twice: a tensor-parallel rank has a part of a matrix, and of the flat buffer of all its parts a
data-parallel rank has a range of elements, which begins and ends anywhere. A range of a row-major tensor is at most
2·ndim - 1 boxes (the end of a row, whole rows, the start of a row). So every tensor is saved under its parameter's name
in boxes of the whole tensor, and any layout can read any other's. `DTensor` cannot say that: each of its dimensions is
cut evenly, and the two cuts here are not of one grid.

`torch.distributed.checkpoint` stores such boxes as they are; what its own planners make of tensors these make of
pieces, through the methods that it documents for that. Price: reading looks at every pair of a wanted and a stored box
of a tensor; a save has as many items as a rank has boxes.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
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

from evenload.runtime.model.tensor_weights import TensorSplit


@dataclass(frozen=True, eq=False)
class Piece:
    """A box that begins at `offsets` of the whole tensor; `local` are its values, a view of live storage."""

    offsets: tuple[int, ...]
    local: Tensor


@dataclass(frozen=True, eq=False)
class TensorPieces:
    """One tensor of the checkpoint as this rank holds it.

    Args:
        shape: of the whole tensor.
        is_replicated: every replica of this rank holds the same pieces, so that one of them writes.
        is_written_elsewhere: another rank (of the tensor-parallel group, of the first stage) holds the same and writes
            it.
    """

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
    """The shape of a whole tensor, and a range of this rank's part of it as boxes.

    Args:
        values: flat, the elements `[first, first + n)` of the part in row-major order.
        local_shape: of the part; split: which part it is, None = all.
    """
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
