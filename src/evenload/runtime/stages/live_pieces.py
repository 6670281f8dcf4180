"""`LivePiece`: a piece of the model (`plan.layouts.moves.Piece`) on one rank, with memory or without.

A trained piece is one flat buffer, a frozen one the tensors that are not trained. Buffers are large enough for every
number of data-parallel ranks of the run's layouts, so that a piece that stays is cut anew without being moved. Memory
may be taken a step ahead (`take`), so that a switch meets no page faults.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from evenload.attention.range_attention import work_dtype
from evenload.plan.layouts.moves import Piece, state_share
from evenload.runtime.comm.mesh import Mesh
from evenload.runtime.optim.parameter_units import (
    BufferGroup,
    FlatBuffer,
    add_gradients_of_autograd,
    attach,
    padded_size,
    tied_names,
    unit_groups,
)
from evenload.runtime.stages.rank_stages import UnitModules
from evenload.runtime.stages.twin_memory import WEIGHTS, PieceMemory, touch

STATE_NAMES = ("exp_avg", "exp_avg_sq")
MASTER_NAME = "master"
"""As `ShardedOptimizer.state_tensors` calls the optimizer's tensors."""


class LivePiece:
    """One piece, whose parameters are the same objects for the whole run; no `group` = it is frozen."""

    def __init__(
        self,
        unit: int,
        parameters: Sequence[nn.Parameter],
        group: BufferGroup | None,
        *,
        at_both_ends: bool,
        data_sizes: Sequence[int],
        device: torch.device,
        is_held: bool,
    ) -> None:
        self.parameters = tuple(parameters)
        self.is_held = is_held
        self.buffer: FlatBuffer | None = None
        self._group, self._data_sizes, self._device = group, tuple(data_sizes), device
        self._memory: tuple[Tensor, Tensor] | None = None
        self._taken: tuple[Tensor, Tensor | None] | None = None
        self.shared: PieceMemory | None = None
        self._shapes = [parameter.shape for parameter in parameters]
        num_elements = sum(shape.numel() for shape in self._shapes)
        self._work = work_dtype(parameters[0])
        self.state_names: tuple[str, ...] = ()
        if group is not None:
            self.state_names = (*STATE_NAMES, *([MASTER_NAME] if self._work != parameters[0].dtype else []))
            if not is_held:
                for parameter in parameters:
                    add_gradients_of_autograd(parameter)
        if not is_held:
            self.drop()
        self.piece = Piece(
            unit=unit,
            num_elements=num_elements,
            weight_bytes=parameters[0].element_size(),
            state_bytes=len(self.state_names) * self._work.itemsize,
            at_both_ends=at_both_ends,
        )

    @property
    def capacity(self) -> int:
        """Elements of its weights that there must be room for."""
        if self._group is None:
            return self.piece.num_elements
        return padded_size(self.piece.num_elements, *self._data_sizes)

    @property
    def held_bytes(self) -> int:
        """Bytes of its weights and gradients, where it is held."""
        grads = 0 if self._group is None else self._work.itemsize
        return self.capacity * (self.piece.weight_bytes + grads)

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """Types of its weights, and of its optimizer's tensors."""
        return {WEIGHTS: self.parameters[0].dtype} | dict.fromkeys(self.state_names, self._work)

    def hold(self, buffer: FlatBuffer) -> None:
        """The run begins with this buffer, as `flatten_units` made it for all `data_sizes`."""
        self.buffer = buffer
        values, grads = (flat.as_strided((self.capacity,), (1,), 0) for flat in (buffer.values, buffer.grads))
        self._memory = values, grads

    def stand_in(self) -> "LivePiece":
        """A piece like this one that nobody holds, with parameters of its own: what one costs that comes and goes."""
        parameters = [
            nn.Parameter(torch.empty(shape, dtype=like.dtype), like.requires_grad)
            for shape, like in zip(self._shapes, self.parameters, strict=True)
        ]
        return LivePiece(
            self.piece.unit,
            parameters,
            self._group,
            at_both_ends=self.piece.at_both_ends,
            data_sizes=self._data_sizes,
            device=self._device,
            is_held=False,
        )

    def share(self, shared: PieceMemory) -> None:
        """From now on its weights lie there. Before the run begins."""
        self.shared = shared
        if not self.is_held:
            return
        values = shared.tensor(WEIGHTS)
        values[: self.piece.num_elements] = torch.cat([p.detach().flatten() for p in self.parameters])
        grads = None if self._memory is None else self._memory[1]
        self._attach(values, grads)
        if self.buffer is not None:
            self.buffer.values = values[: self.buffer.values.numel()]  # in place: the optimizer has it, too

    def take(self) -> None:
        """Take and touch the memory that `gain` will need. In any thread; the piece is not held."""
        values, grads = self._fresh()
        touch(values)
        if grads is not None:
            touch(grads)
        self._taken = values, grads

    def give_back(self) -> None:
        """Give back what `take` took."""
        self._taken = None
        if self.shared is not None:
            self.shared.release(WEIGHTS)

    @property
    def coming(self) -> Tensor:
        """Weights, flat, of a piece whose memory is taken."""
        assert self._taken is not None
        return self._taken[0][: self.piece.num_elements]

    def gain(self) -> None:
        """Take memory; values are to be received, those of padding are zeros."""
        assert not self.is_held
        self.is_held = True
        values, grads = self._taken or self._fresh()
        self._taken = None
        for flat in (values, grads):
            if flat is not None:
                flat[self.piece.num_elements :].zero_()
        self._attach(values, grads)

    def drop(self) -> object:
        """Let memory go: private memory with what is returned, shared memory when it is released."""
        kept = self._memory, [parameter.data for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=self._device)
            parameter.main_grad = None  # type: ignore[attr-defined]
        self.is_held, self.buffer, self._memory = False, None, None
        return kept

    def _fresh(self) -> tuple[Tensor, Tensor | None]:
        dtype = self.parameters[0].dtype
        values = self.shared.tensor(WEIGHTS) if self.shared is not None else self._empty(dtype)
        return values, None if self._group is None else self._empty(self._work)

    def _empty(self, dtype: torch.dtype) -> Tensor:
        return torch.empty(self.capacity, dtype=dtype, device=self._device)

    def _attach(self, values: Tensor, grads: Tensor | None) -> None:
        if grads is not None:
            attach(self.parameters, self._shapes, values, grads)
            self._memory = values, grads
            return
        parts = values.split([shape.numel() for shape in self._shapes])
        for parameter, shape, part in zip(self.parameters, self._shapes, parts, strict=True):
            parameter.data = part.view(shape)

    def cut(self, group: BufferGroup, data_size: int) -> FlatBuffer:
        """The buffer in a layout, in which the piece may have another name and other holders."""
        assert self._memory is not None
        self.buffer = group.in_memory(*self._memory, data_size)
        return self.buffer

    def weights(self) -> tuple[Tensor, ...]:
        """Return what travels as the piece's weights, in place: all of it in one tensor where it is trained."""
        if self._memory is not None:
            return (self._memory[0][: self.piece.num_elements],)
        if self.shared is not None:
            return (self.shared.tensor(WEIGHTS),)
        return tuple(parameter.detach() for parameter in self.parameters)


def share_of_rank(mesh: Mesh, piece: Piece) -> tuple[int, int]:
    """The elements of a piece whose optimizer state this rank owns in a layout in which it holds it."""
    return state_share(mesh.layout, piece, mesh.pp_rank, mesh.data_rank)


def live_pieces(
    modules: UnitModules, buffers: Sequence[FlatBuffer], data_sizes: Sequence[int], device: torch.device
) -> list[LivePiece]:
    """All pieces of the model, held ones with these buffers; in the order of units, which is that of all ranks."""
    tied = tied_names(modules.config, modules.architecture)
    buffer_of = {id(buffer.parameters[0]): buffer for buffer in buffers}
    pieces = []
    for unit, named in enumerate(modules.named_units()):
        trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
        groups: list[tuple[Sequence[nn.Parameter], BufferGroup | None]] = [
            (group.parameters, group) for group in unit_groups(trained, tied, unit)
        ]
        for is_matrix in (True, False):
            frozen = [p for name, p in named if not p.requires_grad and (name in tied) == is_matrix]
            groups += [(frozen, None)] if frozen else []
        for parameters, group in groups:
            piece = LivePiece(
                unit,
                parameters,
                group,
                at_both_ends=bool(tied) and parameters[0] is modules.embedding.weight,
                data_sizes=data_sizes,
                device=device,
                is_held=id(parameters[0]) in modules.held,
            )
            if group is not None and piece.is_held:
                piece.hold(buffer_of[id(parameters[0])])
            pieces.append(piece)
    for module in modules.modules:
        module.to(device)  # what is no parameter: parameters without values are there already
    return pieces
