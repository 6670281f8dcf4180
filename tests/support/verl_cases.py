"""Batches of verl, what ranks of the process pool do with them, and the seconds that a step of them takes."""

import sys
from importlib.util import find_spec
from types import ModuleType

import numpy as np
import torch
import torch.distributed as dist

from evenload.planning.micro_batches import Cost
from evenload.seams import verl as ours

HAS_VERL = all(find_spec(name) for name in ("verl", "tensordict", "ray"))
HIDDEN, VOCABULARY = 8, 16


def stand_in() -> None:
    """Without verl, let `rearrange_micro_batches` find a selection of rows; batches are dictionaries then."""
    if HAS_VERL:
        return
    for name in ("verl", "verl.utils", "verl.utils.tensordict_utils"):
        sys.modules.setdefault(name, ModuleType(name))
    sys.modules["verl.utils.tensordict_utils"].index_select_tensor_dict = _select


def _select(batch: dict, rows: list[int]) -> dict:
    def chosen(column: torch.Tensor) -> torch.Tensor:
        if column.is_nested:
            parts = column.unbind()
            return torch.nested.as_nested_tensor([parts[row] for row in rows], layout=torch.jagged)
        return column[rows]

    return {name: chosen(column) for name, column in batch.items()}


def batch_of(lengths, is_jagged: bool = False, seed: int = 0):
    """Sequences of these lengths: padded in front and behind, or jagged."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(VOCABULARY, (length,), generator=generator) for length in lengths]
    number = torch.arange(len(lengths)) + 100 * seed
    if is_jagged:
        columns = {"input_ids": torch.nested.as_nested_tensor(rows, layout=torch.jagged), "number": number}
    else:
        ids, mask = torch.zeros(2, len(rows), max(lengths) + 3, dtype=torch.int64)
        for at, row in enumerate(rows):
            first = at % 3
            ids[at, first : first + len(row)] = row
            mask[at, first : first + len(row)] = 1
        columns = {"input_ids": ids, "attention_mask": mask, "number": number}
    if not HAS_VERL:
        return columns
    from tensordict import TensorDict

    return TensorDict(columns, batch_size=len(lengths))


def sequences_of(batch) -> list[torch.Tensor]:
    ids = batch["input_ids"]
    if ids.is_nested:
        return list(ids.unbind())
    return [row[kept.bool()] for row, kept in zip(ids, batch["attention_mask"], strict=True)]


def loss_of(weights: dict[str, torch.Tensor], batch, num_tokens: int) -> torch.Tensor:
    """Cross entropy of every next token given the mean of those before, over all tokens of the global batch."""
    total = torch.zeros((), dtype=torch.float64)
    for ids in sequences_of(batch):
        before = torch.arange(1, len(ids), dtype=torch.float64)[:, None]
        mean = weights["embedding"][ids[:-1]].cumsum(0) / before
        logits = torch.tanh(mean) @ weights["head"]
        total = total + torch.nn.functional.cross_entropy(logits, ids[1:], reduction="sum")
    return total / num_tokens


def new_weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(9)
    shapes = {"embedding": (VOCABULARY, HIDDEN), "head": (HIDDEN, VOCABULARY)}
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for name, shape in shapes.items()
    }


def train_step(lengths_of_rank, max_tokens: int, is_jagged: bool, rules: dict, uses_verls_own: bool = False):
    """This rank's loss, the gradients of all, the sequences of its micro-batches and their tokens."""
    stand_in()
    rearrange = ours.rearrange_micro_batches
    if uses_verls_own:
        import verl.utils.seqlen_balancing as deciding

        deciding.get_device_name = lambda: "cpu"  # else it names the one of the machine's accelerator, here "cuda"
        rearrange = deciding.rearrange_micro_batches
    rank = dist.get_rank()
    batch = batch_of(lengths_of_rank[rank], is_jagged, rank)
    made, parts = rearrange(batch, max_tokens, dp_group=dist.group.WORLD, **rules)
    assert [one["number"].tolist() for one in made] == [[row + 100 * rank for row in part] for part in parts]
    weights, num_tokens = new_weights(), sum(map(sum, lengths_of_rank))
    total = 0.0
    for micro_batch in made:
        loss = loss_of(weights, micro_batch, num_tokens)
        loss.backward()
        total += loss.item()
    for weight in weights.values():
        dist.all_reduce(weight.grad)
    return total, [weight.grad.numpy() for weight in weights.values()], parts, [type(one).__name__ for one in made]


def refused(lengths_of_rank, max_tokens: int, rules: dict) -> str:
    """What this rank is told; every rank is told, none waits for another."""
    stand_in()
    batch = batch_of(lengths_of_rank[dist.get_rank()])
    try:
        ours.rearrange_micro_batches(batch, max_tokens, dp_group=dist.group.WORLD, **rules)
    except Exception as error:
        dist.barrier()
        return f"{type(error).__name__}: {error}"
    raise AssertionError("it was not refused")


def step_s(lengths_of_rank, parts_of_rank) -> float:
    """Seconds of a step whose ranks wait for each other at every micro-batch."""
    seconds = [
        [Cost().work_s(np.array(lengths)[part]).sum() for part in parts]
        for lengths, parts in zip(lengths_of_rank, parts_of_rank, strict=True)
    ]
    return sum(map(max, zip(*seconds, strict=True))) + len(seconds[0]) * Cost().micro_batch_s
