"""`ParameterUnit`: one unit's parameters as two flat buffers, cut into data-parallel shards.

Parameters become views of a flat buffer in compute precision, gradients (`parameter.main_grad`) views of
a flat fp32 buffer (fp64 for fp64), so that reduction, sharding and the optimizer work on a few long
tensors. Buffers are cut by unit, not by a byte range of the whole model: a change of stages moves whole
units. One buffer takes weight decay (matrices), the other does not (norms, biases).
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from evenload.attention.range_attention import work_dtype
from evenload.runtime.model.hf_model import StageModel
from evenload.runtime.model.tensor_weights import tensor_split


@dataclass(eq=False)
class FlatBuffer:
    """Parameters of one unit and one weight-decay group.

    Args:
        names: Hugging Face parameter names, in order.
        parameters: the parameters, views of `values`.
        num_elements: real elements; the buffers are padded to a multiple of `dp`.
        values: flat, compute precision, [padded]; grads: flat, fp32 or fp64, [padded].
        tied: the buffer holds the embedding/head weight that another rank holds too, and nothing else.
        is_part: of matrices that are cut over a tensor-parallel group, this rank's parts; else all ranks of the group
            hold the same.
        tied_name: what a tied weight is called in checkpoints: as the embedding.
    """

    names: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]
    num_elements: int
    values: Tensor
    grads: Tensor
    decays: bool
    tied: bool
    is_part: bool
    tied_name: str = ""

    def shard(self, flat: Tensor, dp_rank: int, dp: int) -> Tensor:
        """The view of `flat` that a data-parallel rank owns."""
        size = flat.numel() // dp
        return flat[dp_rank * size : (dp_rank + 1) * size]


def flatten_units(stages: StageModel | Sequence[StageModel], dp: int) -> list[FlatBuffer]:
    """Move the parameters of one rank's stages into flat buffers and give each a `main_grad`.

    A parameter of two units (a tied embedding whose head is on the same rank) belongs to the first. Gradients that
    autograd produces itself (norm weights, adapters) are added to `main_grad` by a hook; linears and the embedding
    write there directly. Frozen parameters stay where they are.
    """
    stages = [stages] if isinstance(stages, StageModel) else stages
    is_within = any(stage.is_first for stage in stages) and any(stage.is_last for stage in stages)
    crosses_ranks = bool(stages[0].config.tie_word_embeddings) and not is_within
    embedding_name = f"{stages[0].architecture.names.embedding_path}.weight"
    tied_names = (embedding_name, "lm_head.weight") if crosses_ranks else ()
    buffers, seen = [], set()
    for named in (unit for stage in stages for unit in stage.unit_parameters()):
        named = [(name, p) for name, p in named if id(p) not in seen]
        seen |= {id(p) for _, p in named}
        for tied, decays, is_part in itertools.product((True, False), repeat=3):
            group = [
                (name, p)
                for name, p in named
                if (p.ndim >= 2, tensor_split(p) is not None, name in tied_names) == (decays, is_part, tied)
            ]
            if not group:
                continue
            names, parameters = zip(*group, strict=True)
            num_elements = sum(p.numel() for p in parameters)
            values, grads = _flatten(parameters, num_elements, -(-num_elements // dp) * dp)
            buffers.append(
                FlatBuffer(names, parameters, num_elements, values, grads, decays, tied, is_part, embedding_name)
            )
    return buffers


def frozen_bytes(stages: Sequence[StageModel]) -> int:
    """Weights that one rank holds without gradient or optimizer state."""
    return sum({id(p): p.nbytes for stage in stages for p in stage.frozen_parameters()}.values())


def _flatten(parameters: Sequence[nn.Parameter], num_elements: int, padded: int) -> tuple[Tensor, Tensor]:
    """Values and gradients, [padded], of parameters, which become views of them."""
    values = torch.zeros(padded, dtype=parameters[0].dtype, device=parameters[0].device)
    grads = torch.zeros_like(values, dtype=work_dtype(values))
    sizes = [p.numel() for p in parameters]
    parts, grad_parts = (flat[:num_elements].split(sizes) for flat in (values, grads))
    for parameter, part, grad in zip(parameters, parts, grad_parts, strict=True):
        part.copy_(parameter.detach().flatten())
        parameter.data = part.view(parameter.shape)
        parameter.main_grad = grad.view(parameter.shape)  # type: ignore[attr-defined]
        parameter.register_post_accumulate_grad_hook(_add_to_main_grad)
    return values, grads


def _add_to_main_grad(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.main_grad += parameter.grad  # type: ignore[attr-defined]
    parameter.grad = None
