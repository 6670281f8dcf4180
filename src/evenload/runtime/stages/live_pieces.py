"""`LivePiece`: a piece of the model on one rank, flat in memory while the rank holds it, whose parameters stay the same
objects while layouts change."""

import copy
from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from evenload.attention.range_attention import work_dtype
from evenload.planning.layouts.moves import Piece, state_share
from evenload.runtime.comm.mesh import Mesh
from evenload.runtime.model.hf_model import StageModel
from evenload.runtime.optim.data_parallel import (
    BufferGroup,
    FlatBuffer,
    add_to_main_grad,
    attach,
    padded_size,
    tied_names,
    unit_groups,
)
from evenload.runtime.optim.optimizer import MASTER
from evenload.runtime.stages.twin_layer import WEIGHTS, Elements, PieceMemory


class LivePiece:
    """A piece of the model (`plan.layouts.moves.Piece`) on one rank, flat in memory while it is held.

    Parameters are the same objects for the whole run; those of a piece that is not held have no elements. Buffers fit
    every number of data-parallel ranks of the run's layouts, so a piece that stays is cut anew without being moved.

    Args:
        group: of a trained piece; None = it is frozen.
        buffer: of a trained piece that is held, as `flatten_units` made it for all `data_sizes`.
    """

    def __init__(
        self,
        unit: int,
        parameters: Sequence[nn.Parameter],
        group: BufferGroup | None,
        buffer: FlatBuffer | None,
        *,
        at_both_ends: bool,
        data_sizes: Sequence[int],
        device: torch.device,
        is_held: bool,
    ) -> None:
        self.parameters, self.is_held, self.buffer = tuple(parameters), is_held, buffer
        self.shared: PieceMemory | None = None
        self._device, self._dtype, self._work = device, parameters[0].dtype, work_dtype(parameters[0])
        self._shapes = [parameter.shape for parameter in parameters]
        self._values: Tensor | None = None
        self._grads: Tensor | None = None
        self.state_names: tuple[str, ...] = ()
        if group is not None:
            self.state_names = ("exp_avg", "exp_avg_sq", *([MASTER] if self._work != self._dtype else []))
        self.piece = Piece(
            unit=unit,
            num_elements=sum(shape.numel() for shape in self._shapes),
            weight_bytes=self._dtype.itemsize,
            state_bytes=len(self.state_names) * self._work.itemsize,
            at_both_ends=at_both_ends,
        )
        self.capacity = padded_size(self.piece.num_elements, *(data_sizes if self.is_trained else (1,)))
        """Elements of the memory of its weights."""
        if not is_held:
            for parameter in parameters if self.is_trained else ():
                parameter.register_post_accumulate_grad_hook(add_to_main_grad)
            self.drop()
        elif buffer is not None:
            both = buffer.values, buffer.grads
            self._values, self._grads = (flat.as_strided((self.capacity,), (1,), 0) for flat in both)
        else:
            self._attach(self._flat_weights(), None)

    @property
    def is_trained(self) -> bool:
        return bool(self.state_names)

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        return {WEIGHTS: self._dtype} | dict.fromkeys(self.state_names, self._work)

    @property
    def weights(self) -> Tensor:
        """Its weights, flat and in place, [num_elements], of a piece that is held."""
        assert self._values is not None
        return self._values[: self.piece.num_elements]

    def share_in(self, mesh: Mesh) -> Elements:
        """Return the elements whose optimizer state this rank owns in a layout in which it holds the piece."""
        return state_share(mesh.layout, self.piece, mesh.pp_rank, mesh.data_rank)

    def stand_in(self) -> "LivePiece":
        """Return a piece like this one that nobody holds, to measure what one costs that comes and goes."""
        like = copy.copy(self)
        like.parameters = tuple(nn.Parameter(one.detach(), one.requires_grad) for one in self.parameters)
        like.shared = None
        like.drop()
        return like

    def share(self, shared: PieceMemory) -> None:
        """Move its weights to shared memory, before the run begins."""
        self.shared = shared
        if not self.is_held:
            return
        values = shared.tensor(WEIGHTS)
        values[: self.piece.num_elements] = self._flat_weights()
        self._attach(values, self._grads)
        if self.buffer is not None:
            self.buffer.values = values[: self.buffer.values.numel()]  # in place: the optimizer has it, too

    def gain(self) -> None:
        """Take memory; values are to be received, those of padding are zeros."""
        assert not self.is_held
        self.is_held = True
        values = self._empty(self._dtype) if self.shared is None else self.shared.tensor(WEIGHTS)
        grads = self._empty(self._work) if self.is_trained else None
        for flat in (values, grads):
            if flat is not None:
                flat[self.piece.num_elements :].zero_()
        self._attach(values, grads)

    def drop(self) -> None:
        """Hold the piece no more: private memory goes with its last view, shared memory when it is released."""
        for parameter in self.parameters:
            parameter.data = torch.empty(0, dtype=self._dtype, device=self._device)
            parameter.main_grad = None  # type: ignore[attr-defined]
        self.is_held, self.buffer, self._values, self._grads = False, None, None, None

    def cut(self, group: BufferGroup, data_size: int) -> FlatBuffer:
        """Return its buffer in a layout, in which it may have another name and other holders."""
        assert self._values is not None
        assert self._grads is not None
        self.buffer = group.in_memory(self._values, self._grads, data_size)
        return self.buffer

    def _flat_weights(self) -> Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in self.parameters])

    def _empty(self, dtype: torch.dtype) -> Tensor:
        return torch.empty(self.capacity, dtype=dtype, device=self._device)

    def _attach(self, values: Tensor, grads: Tensor | None) -> None:
        self._values, self._grads = values, grads
        attach(self.parameters, self._shapes, values, grads)


def live_pieces(
    whole: StageModel,
    held: Collection[int],
    buffers: Sequence[FlatBuffer],
    data_sizes: Sequence[int],
    device: torch.device,
) -> list[LivePiece]:
    """Return all pieces of the model in the order of units, the same on all ranks. Those whose parameters are `held`,
    by id, have these buffers where they are trained."""
    tied = tied_names(whole.structure)
    buffer_of = {id(buffer.parameters[0]): buffer for buffer in buffers}
    pieces = []
    for unit, named in enumerate(whole.named_units()):
        trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
        groups: list[tuple[Sequence[nn.Parameter], BufferGroup | None]] = [
            (group.parameters, group) for group in unit_groups(trained, tied, unit)
        ]
        for is_matrix in (True, False):
            frozen = [p for name, p in named if not p.requires_grad and (name in tied) == is_matrix]
            groups += [(frozen, None)] if frozen else []
        pieces += [
            LivePiece(
                unit,
                parameters,
                group,
                buffer_of.get(id(parameters[0])),
                at_both_ends=bool(tied) and parameters[0] is whole.embedding.weight,
                data_sizes=data_sizes,
                device=device,
                is_held=id(parameters[0]) in held,
            )
            for parameters, group in groups
        ]
    for module in whole.modules:
        module.to(device)  # what is no parameter: parameters without values are there already
    return pieces
