"""Runs that stop, save by time or meet a step that is not finite, as one rank of a `GlooPool`."""

import io
import os
import signal
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
import torch.distributed as dist
from rich.console import Console

from dist_training import COSTS, make_trainer
from evenload.cli.worker_setup import RankSetup, run_coefficients
from evenload.cost.coefficients import CostCoefficients
from evenload.cost.validity import missing_costs
from evenload.errors import NonFiniteStepError
from evenload.runtime.trainer import Trainer
from quick_calibration import quick_calibration


def stop_when_one_rank_is_asked(config_file: str, overrides: list[str], requested_rank: int) -> tuple[int, int]:
    """The rank is asked while its second step runs; (steps done, signal) of this rank."""
    trainer = make_trainer(config_file, overrides)
    mesh = trainer.mesh
    is_asked = lambda: int(signal.SIGTERM) if mesh.rank == requested_rank and trainer.steps_done == 1 else 0  # noqa: E731
    for _ in trainer.train(COSTS, 2**34, stop_requested=is_asked):
        pass
    return trainer.steps_done, trainer.stop_signal


class Outcome(NamedTuple):
    """What a run with a poisoned token came to.

    Args:
        error: that ended it; "" = none.
        updated: of every step that ended, whether it changed the weights.
        adamw_steps: updates that AdamW counts.
    """

    error: str
    warnings: list[str]
    updated: list[bool]
    ledger: list[str]
    adamw_steps: int


def train_with_a_poisoned_token(config_file: str, overrides: list[str], token: int, stop_after: int | None) -> Outcome:
    """The first stage's embedding of a token is NaN, so every document that holds it has a NaN loss."""
    trainer = make_trainer(config_file, overrides)
    mesh = trainer.mesh
    trainer.resume()
    if mesh.rank == 0:
        _parameter(trainer, "model.embed_tokens.weight").data[token] = float("nan")
    warnings, updated, ledger, error = [], [], [], ""
    before = _layers(trainer)
    try:
        for report in trainer.train(COSTS, 2**34, stop_after):
            now = _layers(trainer)
            updated.append(not torch.equal(before, now))
            before = now
            if report is not None:
                warnings += [report.warning] if report.warning else []
                ledger = list(report.ledger_lines)
        trainer.save()
    except NonFiniteStepError as stopped:
        error = str(stopped)
    return Outcome(error, warnings, updated, ledger, trainer.state.optimizer.num_steps)


def _parameter(trainer: Trainer, name: str) -> torch.Tensor:
    return next(p for b in trainer.state.buffers for n, p in zip(b.names, b.parameters, strict=True) if n == name)


def _layers(trainer: Trainer) -> torch.Tensor:
    """All weights but the poisoned matrix."""
    parts = [
        p.detach().flatten()
        for b in trainer.state.buffers
        for n, p in zip(b.names, b.parameters, strict=True)
        if "embed_tokens" not in n
    ]
    return torch.cat(parts).clone()


def warnings_of(config_file: str, overrides: list[str]) -> list[str]:
    """Of a whole run, on rank 0."""
    trainer = make_trainer(config_file, overrides)
    return [report.warning for report in trainer.train(COSTS, 2**34) if report is not None]


def costs_of_a_resume(
    config_file: str, overrides: list[str], saved: CostCoefficients, cache: str
) -> tuple[bytes, tuple[str, ...], str, int]:
    """A checkpoint with these costs, resumed: the run's costs, what they lack, what was said, files in the cache."""
    trainer = make_trainer(config_file, overrides)
    mesh = trainer.mesh
    for _ in trainer.train(COSTS, 2**34, 1):
        pass
    trainer.coefficients = saved
    trainer.save()
    again = make_trainer(config_file, overrides)
    again.resume()
    output = io.StringIO()
    os.environ["LOCAL_WORLD_SIZE"] = str(mesh.layout.world_size)
    try:
        with quick_calibration():
            console = Console(file=output, width=1000)
            setup = RankSetup(meshes=again.meshes, threads=1, memory_cap_bytes=2**34, console=console)
            result = run_coefficients(again, Path(cache), setup, 64)
    finally:
        del os.environ["LOCAL_WORLD_SIZE"]
    dist.barrier(group=mesh.control)
    num_cached = len(list(Path(cache).glob("*.json")))
    return msgspec.json.encode(result), missing_costs(result, mesh.layout), output.getvalue(), num_cached
