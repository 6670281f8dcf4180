"""Updated weights gathered beside the next packs: the same training to the bit, and only what is needed waits."""

from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from dist_training import COSTS
from evenload.config.train_config import layout_of, load_train_config
from evenload.runtime.comm.mesh import create_meshes
from evenload.runtime.model.configured import model_spec
from evenload.runtime.trainer import Trainer
from gloo_pool import TIMEOUT_S
from sweeps import sweep
from training_cases import STEPS, write_training_config


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
    config = load_train_config(Path(config_file), overrides)
    mesh = create_meshes(
        [layout_of(config.parallel, model_spec(config).num_layers)], torch.device("cpu"), TIMEOUT_S
    ).start
    trainer, losses, told, beside = Trainer(config, mesh), [], [], 0
    for report in trainer.train(COSTS, 2**34, stop_after):
        beside += bool(trainer.state.optimizer.gathers._last)
        if report is not None:
            losses.append(float(report.row["loss"]))  # type: ignore[arg-type]
            told.append((report.row["gather_s"], report.row["gather_hidden_s"]))
    held = [tensor for _, _, tensor in trainer.state.optimizer.state_tensors()]
    held += [buffer.values for buffer in trainer.state.buffers]
    bits = b"".join(tensor.detach().flatten().view(torch.uint8).numpy().tobytes() for tensor in held)
    return Trained(losses, bits, beside, told)


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for i in range(40):
        (corpus / f"{i}.txt").write_text(f"document {i} " * (1 + (i * 7) % 13 + (30 if i % 11 == 0 else 0)))
    return write_training_config(tmp_path, corpus, num_layers=4)


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
    ranks = 1
    for name, size in sizes.items():
        ranks *= size if name != "virtual" else 1
    found = {}
    for is_on in (False, True):
        here = [*fixed, f"train.overlap_gather={str(is_on).lower()}", f"train.output_dir={tmp_path}/{is_on}"]
        found[is_on] = gloo_pool.run(ranks, train_and_keep, str(config_file), here, STEPS)
    assert found[True][0].losses == found[False][0].losses
    assert [one.state for one in found[True]] == [one.state for one in found[False]]
    assert all(one.beside == 0 for one in found[False])
    # Of the last update no step follows, and of every second one a checkpoint wanted the weights first.
    assert all(one.beside == STEPS - 1 - (STEPS - 1) // 2 for one in found[True])
    assert all(gather_s > 0 == hidden_s for gather_s, hidden_s in found[False][0].told)
    # The first step has no update before it; the last one has two, of which nothing hides the second.
    assert found[True][0].told[0] == (0, 0)
    assert all(gather_s >= hidden_s > 0 for gather_s, hidden_s in found[True][0].told[1:])
