"""What every engine's adapter must show, whatever the engine: one suite for all of them.

An adapter writes an `EngineCase` (`engine_records`), whose functions run on every rank, and calls these checks with
something that has `run(world_size, function, *arguments)`: the pool of gloo ranks, or `FreshRanks` where an engine
leaves global state behind. Engines whose loop is the caller's write an `EngineRun` and hand it to `train_by_hand` and
`perturb_by_hand`; engines with a loop of their own (Trainers) fill a `RankRecord` themselves.

The reference is plain training in float64: documents one by one, no packs, no ranks.
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest
import torch

from engine_records import EngineCase, RankRecord, TrainOrder
from gloo_pool import GlooPool
from packed_cases import plain_loss, tokens_of, write_texts
from rank_server import forking_after

LONGEST = 127
STEPS, SAVED_AFTER, RESUMED_STEPS = 20, 8, 4


class Ranks(Protocol):
    """Where functions run as ranks."""

    def run(self, world_size: int, function: Any, *arguments: Any) -> list: ...


class FreshRanks:
    """Every call on processes of its own, for engines that keep global state of the process group; `prepare` imports
    the engine (`forking_after`)."""

    def __init__(self, prepare: Callable[[], object] = list) -> None:
        self._prepare = prepare

    def run(self, world_size: int, function: Any, *arguments: Any) -> list:
        return forking_after(self._prepare, _run_fresh, world_size, function, *arguments)


def _run_fresh(world_size: int, function: Any, *arguments: Any) -> list:
    pool = GlooPool()
    try:
        return pool.run(world_size, function, *arguments)
    finally:
        pool.close()


def write_uneven(root: Path) -> list[str]:
    """Texts from one letter to a whole pack: half are shorter than seven letters; returns the texts."""
    return write_texts(root, 24, LONGEST + 1, seed=5, spread=(2.0, 1.5), first=(1, LONGEST))


def check_gradients(ranks: Ranks, case: EngineCase, root: Path, world_size: int = 2) -> float:
    """Every step of an epoch has loss and gradients of its documents one by one, and the epoch every token once.

    Returns:
        The largest relative error of a step's gradient.
    """
    texts = write_uneven(root)
    order = TrainOrder(root, 0.0, keep_gradients=True)
    records = ranks.run(world_size, case.train, case, order)
    steps = _documents_by_step(records)
    assert Counter(document for step in steps for document in step) == Counter(map(tokens_of, texts))
    assert len(steps) > 1, "an epoch of one batch shows nothing of the next"
    if case.uneven_counts:
        counts = [record.counts for record in records]
        assert any(len(set(of_step)) > 1 for of_step in zip(*counts, strict=True)), f"even counts: {counts}"
    model, largest = case.reference(), 0.0
    for index, documents in enumerate(steps):
        loss = plain_loss(model, documents)
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        assert records[0].losses[index] == pytest.approx(loss, rel=case.gradient_error)
        largest = max(largest, _require_close(records[0].gradients[index], gradients, case.gradient_error))
    return largest


def check_isolation(ranks: Ranks, case: EngineCase, root: Path, world_size: int = 2) -> None:
    """Another document in a pack changes its own outputs and nobody else's."""
    write_uneven(root)
    result = [one for one in ranks.run(world_size, case.perturb, case, root) if one is not None]
    assert result, "no rank had a pack of two documents"
    for before, after, start, stop in result:
        difference = (before - after).abs().amax(-1)
        assert bool((difference[start:stop] > 0).all())
        others = torch.cat([difference[:start], difference[stop:]])
        assert others.numel()
        assert others.max().item() <= case.output_error


def check_training(
    ranks: Ranks,
    case: EngineCase,
    root: Path,
    world_size: int = 2,
    resumed_world_sizes: tuple[int, ...] = (1,),
    resumed: EngineCase | None = None,
) -> None:
    """Steps of training give the losses and weights of plain training, and a checkpoint goes on with other ranks.

    Args:
        resumed: with other settings; default: the same.
    """
    write_uneven(root)
    saved = root.parent / "saved"
    order = TrainOrder(root, case.learning_rate, num_steps=STEPS, save_to=saved, save_after=SAVED_AFTER)
    whole = ranks.run(world_size, case.train, case, order)
    steps = _documents_by_step(whole)
    losses, weights = plain_training(case, steps)
    _compare(whole[0], losses, weights[STEPS - 1], case, STEPS)
    assert np.mean(whole[0].losses[-5:]) < 0.9 * np.mean(whole[0].losses[:5]), "the loss falls"
    for resumed_size in resumed_world_sizes:
        more = TrainOrder(root, case.learning_rate, num_steps=RESUMED_STEPS, load_from=saved)
        rest = ranks.run(resumed_size, case.train, resumed or case, more)
        after = slice(SAVED_AFTER, SAVED_AFTER + RESUMED_STEPS)
        assert [Counter(step) for step in _documents_by_step(rest)] == [Counter(step) for step in steps[after]]
        _compare(rest[0], losses[after], weights[after.stop - 1], case, after.stop)


def plain_training(case: EngineCase, steps: list) -> tuple[list[float], list[dict[str, torch.Tensor]]]:
    """Losses, and weights after every step, of the case's optimizer on documents run one by one."""
    model = case.reference()
    optimizer = case.optimizer(model.parameters(), case.learning_rate)
    losses, weights = [], []
    for documents in steps:
        losses.append(plain_loss(model, documents))
        optimizer.step()
        weights.append({name: parameter.detach().clone() for name, parameter in model.named_parameters()})
    return losses, weights


def _documents_by_step(records: list[RankRecord]) -> list[list[tuple[int, ...]]]:
    """The documents of every global batch; ranks of one replica count once."""
    shares = {record.replica: record.documents for record in records}.values()
    return [[document for part in parts for document in part] for parts in zip(*shares, strict=True)]


def _compare(
    record: RankRecord, losses: list[float], weights: dict[str, torch.Tensor], case: EngineCase, num_steps: int
) -> None:
    limit = case.training_error(num_steps)
    assert record.losses == pytest.approx(losses, rel=limit)
    _require_close(record.parameters, weights, limit)


def _require_close(result: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], limit: float) -> float:
    """The relative error of all tensors as one vector, which is within the limit; each one alone is within four times.

    Rounding puts an error on a small gradient that is like that of the large ones around it; a gradient that is missing
    or scaled is wrong by far more than four times the limit.
    """
    assert {name: tensor.shape for name, tensor in result.items()} == {
        name: tensor.shape for name, tensor in expected.items()
    }
    differences = {name: torch.linalg.vector_norm(result[name].double() - expected[name]) for name in expected}
    lengths = {name: torch.linalg.vector_norm(tensor) for name, tensor in expected.items()}
    errors = {name: (differences[name] / lengths[name]).item() for name in expected}
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] <= 4 * limit, f"{worst} is off by {errors[worst]:.1e}"
    whole = torch.stack([*differences.values()]).norm() / torch.stack([*lengths.values()]).norm()
    assert whole.item() <= limit, f"all together are off by {whole.item():.1e}"
    return whole.item()
