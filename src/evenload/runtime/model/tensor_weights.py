"""Cut weights to the parts of a tensor-parallel rank, and refuse models that cannot be cut.

    cut by output (rows)     q k v, gate, up, their biases; sinks; embedding and head by token ids
    cut by input (columns)   o, down
    some on every rank       experts, each whole
    whole on every rank      norms, routers, biases after a sum over ranks, linears that the plan does not name
    adapters (LoRA)          B of what is cut by output, A of what is cut by input; the other one is whole

Weights are filled whole, unit by unit, and cut at once, so every tp starts from the same weights. A vocabulary that
does not divide gives the last ranks fewer token ids.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from evenload.errors import ConfigError, UnsupportedModelError
from evenload.runtime.comm.tensor_group import TensorGroup
from evenload.runtime.model.lora import is_adapter
from evenload.runtime.model.structure import Structure, linear_kind


@dataclass(frozen=True)
class TensorSplit:
    """Describes a part of a tensor: `[start, start + size)` of dimension `dim`, which has `whole_size` in all; every
    rank has `part` rows or columns, the last ones perhaps fewer."""

    dim: int
    start: int
    size: int
    whole_size: int
    part: int


def tensor_split(parameter: Tensor) -> TensorSplit | None:
    return getattr(parameter, "tp_split", None)


def require_tensor_parallel(config: PretrainedConfig, structure: Structure, tp: int) -> None:
    """Raise `ConfigError` for heads, feed-forward columns or experts that do not divide by `tp`,
    `UnsupportedModelError` for a model whose blocks mix what lies on different ranks."""
    if tp == 1:
        return
    if why := structure.cut.refusal:
        raise UnsupportedModelError(f"parallel.tp is {tp} and the model {why}; use parallel.dp, pp or cp")
    if mixers := sorted({path for sites in structure.sites for path in sites.mixers}):
        raise UnsupportedModelError(
            f"parallel.tp is {tp} and the model mixes tokens in {', '.join(mixers)}, which needs all of them; use "
            "parallel.dp or pp"
        )
    for name, size in structure.cut.sizes:
        if size % tp:
            raise ConfigError(
                f"parallel.tp is {tp}, but {name} of the model is {size}, which does not divide by it; choose a tp "
                f"that divides {', '.join(f'{n} {s}' for n, s in structure.cut.sizes)}"
            )
    if (tp - 1) * -(-config.vocab_size // tp) >= config.vocab_size:
        raise ConfigError(
            f"parallel.tp is {tp}, but vocab_size of the model is {config.vocab_size}: some rank would get none of it; "
            "choose a smaller tp"
        )


def split_weights(
    modules: Iterable[tuple[str, nn.Module]], structure: Structure, rank: int, tp: int, *, filled: bool = True
) -> None:
    """Cut named modules and all modules inside them, in place, to a tensor-parallel rank's parts. Without `filled`
    weights have no values, and their memory stays untouched."""
    for prefix, unit in modules:
        for name, module in unit.named_modules(prefix=prefix):
            for parameter_name, parameter in module.named_parameters(recurse=False):
                dim = _split_dim(name, parameter_name, structure)
                if dim is not None and tensor_split(parameter) is None:
                    _cut(parameter, dim, rank, tp, filled=filled)
            if isinstance(module, nn.Linear):
                module.out_features, module.in_features = module.weight.shape


def adapter_of(name: str, part: str, linears: Collection[str]) -> bool:
    """Say whether a module is this matrix ("lora_A", "lora_B") of an adapter of one of these linears."""
    parts = name.split(".")
    return len(parts) > 2 and parts[-2] == part and parts[-3] in linears


def _split_dim(name: str, parameter_name: str, structure: Structure) -> int | None:
    """Return the dimension of a module's parameter that is cut; None = every rank holds it whole."""
    columns, rows = structure.cut.columns, structure.cut.rows
    if is_adapter(name):
        # The first matrix of an adapter whose linear is cut by input makes partial sums, too.
        return 1 if adapter_of(name, "lora_A", rows) else 0 if adapter_of(name, "lora_B", columns) else None
    if {linear_kind(name), parameter_name} & columns:  # a parameter beside linears is one number a head
        return 0
    if name in (structure.embedding, structure.head, *structure.cut.experts):
        return 0
    return 1 if linear_kind(name) in rows and parameter_name == "weight" else None


def _cut(parameter: nn.Parameter, dim: int, rank: int, tp: int, *, filled: bool) -> None:
    whole = parameter.shape[dim]
    part = -(-whole // tp)
    start = min(rank * part, whole)
    size = min(part, whole - start)
    part_of_it = parameter.data.narrow(dim, start, size)
    # Memory of its own, so that the whole tensor is freed.
    own = torch.empty_like(part_of_it, memory_format=torch.contiguous_format)
    parameter.data = own.copy_(part_of_it) if filled else own
    parameter.tp_split = TensorSplit(dim, start, size, whole, part)  # type: ignore[attr-defined]


def join_parts(local: Tensor, split: TensorSplit | None, group: TensorGroup | None) -> Tensor:
    """Join the parts of a group into the whole tensor, on every rank. Collective where it is cut."""
    if split is None or group is None:
        return local
    rows = local.movedim(split.dim, 0)
    padded = rows.new_zeros(split.part, *rows.shape[1:])
    padded[: split.size] = rows
    whole = group.all_gather(padded, "parts of a tensor").wait()[: split.whole_size]
    return whole.movedim(0, split.dim).contiguous()
