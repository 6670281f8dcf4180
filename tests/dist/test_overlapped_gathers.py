"""Updated weights gathered beside the next packs: the same training to the bit, and only what is needed waits."""

import math
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from dist_training import COSTS, make_trainer
from sweeps import sweep
from training_cases import STEPS, UNEVEN_TEXTS, write_training_config


class Trained(NamedTuple):
    """A run on one rank.

    Args:
        state: every element of weights and optimizer state as bits.
        beside: of its updates, those whose gathers were left for the next step.
        told: of every step, seconds of gathers and what is hidden of them; on rank 0.
    """

    losses: list[float]
    state: bytes
    beside: int
    told: list[tuple[float, float]]


def train_and_keep(config_file: str, overrides: list[str], stop_after: int) -> Trained:
    """Train without resuming."""
    trainer, losses, reported, beside = make_trainer(config_file, overrides), [], [], 0
    for report in trainer.train(COSTS, 2**34, stop_after):
        beside += bool(trainer.state.optimizer.gathers._last)
        if report is not None:
            losses.append(float(report.row["loss"]))  # type: ignore[arg-type]
            reported.append((report.row["gather_s"], report.row["gather_hidden_s"]))
    held = [tensor for _, _, tensor in trainer.state.optimizer.state_tensors()]
    held += [buffer.values for buffer in trainer.state.buffers]
    bits = b"".join(tensor.detach().flatten().view(torch.uint8).numpy().tobytes() for tensor in held)
    return Trained(losses, bits, beside, reported)


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    return write_training_config(tmp_path, UNEVEN_TEXTS, num_layers=4)


CASES = (
    ({"pp": 2, "dp": 2}, "bfloat16"),
    ({"dp": 3}, "float32"),
    ({"pp": 2, "dp": 2, "virtual": 2}, "float32"),
    ({"dp": 2, "tp": 2}, "bfloat16"),
    ({"cp": 2, "dp": 2}, "float64"),
)


@pytest.mark.parametrize(("sizes", "dtype"), sweep(CASES, 2), ids=str)
def test_training_is_the_same_to_the_bit(gloo_pool, config_file, tmp_path, sizes, dtype):
    """Losses, weights, moments and masters of every rank, with checkpoints on the way, which need whole weights."""
    fixed = [f"model.dtype={dtype}", "train.checkpoint_every_steps=2"]
    fixed += [f"parallel.{name}={size}" for name, size in sizes.items()]
    ranks = math.prod(size for name, size in sizes.items() if name != "virtual")
    result = {}
    for is_on in (False, True):
        here = [*fixed, f"train.overlap_gather={str(is_on).lower()}", f"train.output_dir={tmp_path}/{is_on}"]
        result[is_on] = gloo_pool.run(ranks, train_and_keep, str(config_file), here, STEPS)
    assert result[True][0].losses == result[False][0].losses
    assert [one.state for one in result[True]] == [one.state for one in result[False]]
    assert all(one.beside == 0 for one in result[False])
    # Of the last update no step follows, and of every second one a checkpoint wanted the weights first.
    assert all(one.beside == STEPS - 1 - (STEPS - 1) // 2 for one in result[True])
    assert all(gather_s > 0 == hidden_s for gather_s, hidden_s in result[False][0].told)
    # The first step has no update before it; the last one has two, of which nothing hides the second.
    assert result[True][0].told[0] == (0, 0)
    assert all(gather_s >= hidden_s > 0 for gather_s, hidden_s in result[True][0].told[1:])
