"""Resume: a run that is stopped and started anew goes on as if it had not been.

One trainer trains to the end and saves on the way; another, made from nothing, resumes from that checkpoint. Its
batches (the digests of its plans) and its losses and gradient norms must be the first one's, bit for bit.

Price: seven small steps, one save, one load.
"""

import shutil
from pathlib import Path

import torch.distributed as dist

from evenload.check.smaller_run import STEPS
from evenload.check.verdict import Verdict, failed, passed
from evenload.config.train_config import TrainConfig
from evenload.cost.coefficients import CostCoefficients
from evenload.errors import ConfigError
from evenload.runtime.comm.mesh import Mesh
from evenload.runtime.trainer import Trainer
from evenload.types.counted import counted

_COMPARED = ("loss", "grad_norm", "tokens", "documents")


def check_resume(config: TrainConfig, coefficients: CostCoefficients, memory_cap_bytes: int, mesh: Mesh) -> Verdict:
    """Train, save a checkpoint before the last steps and no other, resume, compare. Collective."""
    directory = Path(config.train.output_dir)
    if mesh.rank == 0:
        shutil.rmtree(directory, ignore_errors=True)
    dist.barrier(group=mesh.control)
    whole = _rows(Trainer(config, mesh), coefficients, memory_cap_bytes)
    again = Trainer(config, mesh)
    found = again.resume()
    if found is None:
        raise ConfigError(f"{directory} holds no checkpoint, although one was saved; is train.output_dir shared?")
    first = again.steps_done
    resumed = _rows(again, coefficients, memory_cap_bytes)
    same = f"{counted(STEPS - first, 'step')} after a restart from step {first}"
    found_differences = [
        f"step {step}: {key} {ours} instead of {theirs}"
        for step, (row, expected) in enumerate(zip(resumed, whole[first:], strict=True), start=first)
        for key, ours, theirs in zip(("plan", *_COMPARED), row, expected, strict=True)
        if ours != theirs
    ]
    different = [found_differences[:4]]
    dist.broadcast_object_list(different, src=0, group=mesh.control)
    if different[0]:
        return failed("resume", f"{same}: not as without", "; ".join(different[0]))
    return passed("resume", f"{same}: batches, losses and gradient norms equal to the bit")


def _rows(trainer: Trainer, coefficients: CostCoefficients, memory_cap_bytes: int) -> list[tuple]:
    """(digest of the plan, compared metrics) of every step, on rank 0."""
    return [
        (report.plan.digest, *(report.row[key] for key in _COMPARED))
        for report in trainer.train(coefficients, memory_cap_bytes, STEPS)
        if report is not None
    ]
