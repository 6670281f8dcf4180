"""Runs that keep their last steps for survivors, as one rank of a `GlooPool`."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from dist_training import COSTS
from evenload.config.layouts import layouts_of
from evenload.config.train_config import load_train_config
from evenload.cost.survivor_memory import survivor_bytes
from evenload.runtime.checkpoint.kept_steps import KeptStep, KeptSteps
from evenload.runtime.checkpoint.shared_directory import held_bytes
from evenload.runtime.comm.mesh import create_meshes
from evenload.runtime.model.configured import model_spec
from evenload.runtime.trainer import Trainer
from gloo_pool import TIMEOUT_S
from switch_cases import whole_state


class KeptRun(NamedTuple):
    """Of one rank.

    Args:
        from_step: that was kept by the round before; -1 = there was none.
        before, after: weights and optimizer state of the whole model, when it began and when it ended.
        updates: of the optimizer, when it began.
        kept_bytes: of this rank's files.
        predicted_bytes: of the fullest rank.
    """

    from_step: int
    before: dict[str, np.ndarray]
    after: dict[str, np.ndarray]
    updates: int
    kept_bytes: int
    predicted_bytes: int


def kept_run(config_file: str, overrides: list[str], directory: str, number: int, stop_after: int) -> KeptRun:
    """Go on from what another round has kept, train until so many steps are done, and keep them."""
    config = load_train_config(Path(config_file), overrides)
    layouts = layouts_of(config, (model := model_spec(config)).num_layers)
    meshes = create_meshes(layouts, torch.device("cpu"), TIMEOUT_S)
    rank = meshes.start.rank
    kept = KeptSteps(Path(directory), number, rank, meshes.start.num_ranks)
    trainer = Trainer(config, meshes.start, meshes, kept)
    found = trainer.resume()
    before, updates = whole_state(trainer), trainer.state.optimizer.num_steps
    for _ in trainer.train(COSTS, 2**34, stop_after):
        pass
    return KeptRun(
        found.steps_done if isinstance(found, KeptStep) else -1,
        before,
        whole_state(trainer),
        updates,
        held_bytes(Path(directory) / f"round-{number}" / f"rank-{rank}"),
        int(survivor_bytes(model, layouts[0]).max()),
    )
