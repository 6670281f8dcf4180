"""Cut weights to the parts of a tensor-parallel rank, and refuse models that cannot be cut.

    cut by output (rows)     q k v, gate, up, their biases; sinks; embedding and head by token ids
    cut by input (columns)   o, down
    cut section by section   packed weights of modules that carry states (`packed_cuts`)
    some on every rank       experts, each whole
    whole on every rank      norms, routers, biases after a sum over ranks, linears that the plan does not name
    adapters (LoRA)          B of what is cut by output, A of what is cut by input; the other one is whole

Weights are filled whole, unit by unit, and cut at once, so every tp starts from the same weights. A vocabulary that
does not divide gives the last ranks fewer token ids.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from evenload.errors import ConfigError, UnsupportedModelError
from evenload.runtime.comm.tensor_group import TensorGroup, with_padding
from evenload.runtime.model.lora import is_adapter
from evenload.runtime.model.packed_cuts import take_share
from evenload.runtime.model.structure import Structure, block_of, linear_kind


@dataclass(frozen=True)
class TensorSplit:
    """Describes what a rank has of a tensor: in dimension `dim`, where `sections` of these sizes lie one behind the
    other, its part of each. All parts of a section are as large, where there is one but the last ones, perhaps."""

    dim: int
    rank: int
    ranks: int
    sections: tuple[int, ...]

    @property
    def parts(self) -> list[int]:
        """The largest part of every section."""
        return [-(-size // self.ranks) for size in self.sections]

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """Where in the whole tensor own parts begin, and their sizes, in order."""
        result, first = [], 0
        for size, part in zip(self.sections, self.parts, strict=True):
            start = min(self.rank * part, size)
            result.append((first + start, min(part, size - start)))
            first += size
        return result

    def take(self, whole: Tensor) -> Tensor:
        """Return own parts of a whole tensor, in memory of their own."""
        return torch.cat([whole.narrow(self.dim, *part) for part in self.ranges], self.dim)

    def placed(self, first: int, box: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield where in the whole tensor rows or columns of own parts lie, `first` and those after it, as views."""
        before = 0
        for start, size in self.ranges:
            low, high = max(first, before), min(first + box.shape[self.dim], before + size)
            if low < high:
                yield start + low - before, box.narrow(self.dim, low - first, high - low)
            before += size


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
                    sections = _sections(name, parameter_name, structure) or (parameter.shape[dim],)
                    _cut(parameter, TensorSplit(dim, rank, tp, sections), filled=filled)
            if isinstance(module, nn.Linear):
                module.out_features, module.in_features = module.weight.shape
            if cut := structure.cut.packed.get(name):
                take_share(module, cut, tp)
                for buffer_name, buffer in module.named_buffers(recurse=False):
                    sections = cut.sections.get(buffer_name, ())
                    if sections and buffer.shape[-1] == sum(sections):
                        setattr(module, buffer_name, TensorSplit(buffer.ndim - 1, rank, tp, sections).take(buffer))


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
    if _sections(name, parameter_name, structure):
        return 0
    if {linear_kind(name), parameter_name} & columns:  # a parameter beside linears is one number a head
        return 0
    if name in (structure.embedding, structure.head, *structure.cut.experts):
        return 0
    return 1 if linear_kind(name) in rows and parameter_name == "weight" else None


def _sections(name: str, parameter_name: str, structure: Structure) -> tuple[int, ...]:
    """Return the sections of a parameter of a module with packed weights, or of an adapter of one; () = none."""
    module = name.split(".lora_")[0].removesuffix(".base_layer")
    for path, part in ((module, parameter_name), (block_of(module), linear_kind(module))):
        if cut := structure.cut.packed.get(path):
            return cut.sections.get(part, ())
    return ()


def _cut(parameter: nn.Parameter, split: TensorSplit, *, filled: bool) -> None:
    if filled:
        parameter.data = split.take(parameter.data)
    else:
        shape = list(parameter.shape)
        shape[split.dim] = sum(size for _, size in split.ranges)
        parameter.data = parameter.data.new_empty(shape)
    parameter.tp_split = split  # type: ignore[attr-defined]


def join_parts(local: Tensor, split: TensorSplit | None, group: TensorGroup | None) -> Tensor:
    """Join the parts of a group into the whole tensor, on every rank. Collective where it is cut."""
    if split is None or group is None:
        return local
    rows = local.movedim(split.dim, 0)
    padded = with_padding(rows, sum(split.parts))
    gathered = group.all_gather(padded, "parts of a tensor").wait().unflatten(0, (split.ranks, -1))
    whole = torch.cat(
        [parts.flatten(0, 1)[:size] for parts, size in zip(gathered.split(split.parts, 1), split.sections, strict=True)]
    )
    return whole.movedim(0, split.dim).contiguous()
