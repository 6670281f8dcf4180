"""Plain training to compare with: transformers' own model and attention, one document at a time, torch's autograd.

Nothing of the runtime takes part, except that random weights come from it (they depend on the seed and the unit).
Documents are divided over the ranks, and their gradients summed.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from evenload.data.encoding.token_table import TokenTable
from evenload.runtime.comm.mesh import Mesh
from evenload.runtime.config.train_config import TrainConfig
from evenload.runtime.model.configured import load_config
from evenload.runtime.model.hf_model import build_stage_model


def plain_step(
    config: TrainConfig, tokens: TokenTable | Mapping[int, NDArray[np.int32]], dtype: torch.dtype, mesh: Mesh
) -> tuple[float, dict[str, Tensor]]:
    """Loss and the gradient of every parameter, on every rank. Collective.

    Args:
        tokens: of all documents, with labels where they have some.
        dtype: to compute in; weights are those of the configured precision.
    """
    model = _plain_model(config, dtype)
    labels = {doc: _labels(tokens, doc) for doc in sorted(tokens)}
    num_labels = max(1, sum(int((row[1:] != -100).sum()) for row in labels.values()))
    total = torch.zeros(1, dtype=torch.float64)
    for doc in list(labels)[mesh.rank :: mesh.layout.world_size]:
        row = torch.from_numpy(np.asarray(tokens[doc])).long()
        logits = model(row[None], use_cache=False).logits[0, :-1]
        exact = logits if dtype == torch.float64 else logits.float()
        loss = nn.functional.cross_entropy(exact, labels[doc][1:], reduction="sum") / num_labels
        if loss.requires_grad and len(row) > 1:
            loss.backward()
            total += loss.detach().double()
    dist.all_reduce(total, group=mesh.control)
    gradients = {}
    for name, parameter in model.named_parameters():
        # Ranks add in float64: only the model's own arithmetic is in the configured precision.
        gradient = (torch.zeros_like(parameter) if parameter.grad is None else parameter.grad).double()
        dist.all_reduce(gradient, group=mesh.control)
        gradients[name] = gradient
    return float(total), gradients


def _plain_model(config: TrainConfig, dtype: torch.dtype) -> Any:
    hf = load_config(config.model.path)
    hf._attn_implementation = "sdpa"
    own = getattr(torch, config.model.dtype)
    if not config.model.random_init:
        whole: Any = AutoModelForCausalLM.from_pretrained(config.model.path, config=hf, dtype=own)
        return whole.to(dtype)
    ours = build_stage_model(
        load_config(config.model.path),
        layers=(0, hf.num_hidden_layers),
        dtype=own,
        device=torch.device("cpu"),
        weights=None,
        seed=config.train.seed,
    )
    weights = {name: parameter.detach() for named in ours.unit_parameters() for name, parameter in named}
    model = AutoModelForCausalLM.from_config(hf, dtype=own)
    _, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected
    model.tie_weights()
    return model.to(dtype)


def _labels(tokens: TokenTable | Mapping[int, NDArray[np.int32]], doc: int) -> Tensor:
    row = tokens.labels_of(doc) if isinstance(tokens, TokenTable) else tokens[doc]
    return torch.from_numpy(np.array(row)).long()
