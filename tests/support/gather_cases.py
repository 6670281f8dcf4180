"""Updated weights that arrive beside packs, as one rank of a `GlooPool` sees them."""

from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from dist_training import COSTS
from evenload.config.train_config import layout_of, load_train_config
from evenload.runtime.comm.mesh import create_meshes
from evenload.runtime.model.configured import model_spec
from evenload.runtime.optim.data_parallel import WeightGathers
from evenload.runtime.optim.parameter_units import FlatBuffer
from evenload.runtime.trainer import Trainer
from evenload.types.layout import even_layout
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


def one_unit_after_the_other(num_units: int) -> list[list[float]]:
    """On two ranks: the second lets a unit's gather begin when the first has read all units before it. The values of
    every unit as the first read them."""
    mesh = create_meshes([even_layout(1, dp=2)], torch.device("cpu"), TIMEOUT_S).start
    buffers = []
    for unit in range(num_units):
        values = torch.full((4,), float("nan"))
        values[2 * mesh.rank : 2 * mesh.rank + 2] = 10.0 * unit + mesh.rank
        buffers.append(FlatBuffer((), (), 4, values, values.clone(), False, False, False, unit))
    gathers, seen = WeightGathers(mesh, is_overlapped=True), []
    word = torch.zeros(1)
    if mesh.rank == 0:
        for buffer in buffers:
            gathers.put(buffer)
        gathers.seal()
        for buffer in buffers:
            gathers.await_unit(buffer.unit)
            seen.append(buffer.values.tolist())
            dist.send(word, 1, group=mesh.control)
    else:
        for buffer in buffers:
            gathers.put(buffer)
            dist.recv(word, 0, group=mesh.control)
        gathers.seal()
    gathers.finish()
    (trace,) = gathers.take_traces(mesh)
    assert trace.unit.tolist() == list(range(num_units))
    assert gathers.take_traces(mesh) == []
    return seen
