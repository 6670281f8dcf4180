"""A training run as one rank of a `GlooPool`."""

from pathlib import Path

import torch

from evenload.cost.coefficients import CostCoefficients, PassCoefficients
from evenload.runtime.config import load_train_config
from evenload.runtime.mesh import create_mesh
from evenload.runtime.trainer import Trainer, layout_of, model_spec

COSTS = CostCoefficients(
    source="analytic",
    device="test",
    peak_flops_per_s=1e9,
    forward=PassCoefficients(linear_s_per_token=1e-3, attention_s_per_pair=1e-5, slice_s=1e-5, pack_s=1e-4),
    backward=PassCoefficients(linear_s_per_token=2e-3, attention_s_per_pair=2.5e-5, slice_s=2e-5, pack_s=2e-4),
    head_s_per_token=5e-4,
    p2p_bandwidth_bytes_per_s=1e9,
    p2p_latency_s=1e-5,
    reduce_bandwidth_bytes_per_s=1e9,
    reduce_latency_s=1e-5,
)


def train_steps(config_file: str, overrides: list[str], stop_after: int, export: bool = False) -> list[float]:
    """Resume if there is a checkpoint, train until `stop_after` steps are done, save; losses on rank 0.

    The learning rate follows the configured number of steps, so a run may stop early and go on.
    """
    config = load_train_config(Path(config_file), overrides)
    mesh = create_mesh(layout_of(config, model_spec(config).num_layers), torch.device("cpu"), 60)
    trainer = Trainer(config, mesh)
    trainer.resume()
    losses = []
    for report in trainer.train(COSTS, 2**34, stop_after):
        if report is not None:
            losses.append(report.row["loss"])
    trainer.save()
    if export:
        trainer.export()
    return losses
