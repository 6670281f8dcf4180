"""Updated weights that arrive beside packs, as one rank of a `GlooPool` sees them."""

from pathlib import Path
from typing import NamedTuple

import torch

from dist_training import COSTS
from evenload.config.train_config import layout_of, load_train_config
from evenload.runtime.comm.mesh import create_meshes
from evenload.runtime.model.configured import model_spec
from evenload.runtime.trainer import Trainer
from gloo_pool import TIMEOUT_S


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
    mesh = create_meshes([layout_of(config, model_spec(config).num_layers)], torch.device("cpu"), TIMEOUT_S).start
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
