"""Saves that fail and states that come back, as one rank of a `GlooPool`."""

import resource
import signal

import torch
import torch.distributed as dist

from dist_training import COSTS, make_trainer
from evenload.cost.memory import checkpoint_bytes
from evenload.errors import CheckpointError, ConfigError, DataError
from evenload.runtime.checkpoint.checkpoint import load_checkpoint, run_tensors, tensors_to_write
from evenload.runtime.model.model_config import model_spec


def train_with_a_full_disk(
    config_file: str, overrides: list[str], full_on_rank: int, full_from_step: int, full_until_step: int
) -> tuple[list[str], list[float], str]:
    """Train to the end while one rank's disk takes no more than 1,000 bytes a file between two steps.

    Returns:
        Failures that were reported, losses (rank 0), and the error that ended the run, or "".
    """
    trainer = make_trainer(config_file, overrides)
    mesh = trainer.mesh
    failures, losses = [], []
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        for report in trainer.train(COSTS, 2**34):
            if report is not None:
                losses.append(report.row["loss"])
                failures += [report.failed_save] if report.failed_save else []
            is_full = full_from_step <= trainer.steps_done < full_until_step
            if mesh.rank == full_on_rank:
                resource.setrlimit(resource.RLIMIT_FSIZE, (1000 if is_full else before[0], before[1]))
        trainer.save()
    except CheckpointError as error:
        return failures, losses, str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    return failures, losses, ""


def random_numbers_after_resume(config_file: str, overrides: list[str]) -> tuple:
    """Save; (numbers drawn next, numbers drawn next after a resume, cost file after the resume)."""
    trainer = make_trainer(config_file, overrides)
    mesh = trainer.mesh
    for _ in trainer.train(COSTS, 2**34, 1):
        pass
    torch.manual_seed(100 + mesh.rank)
    torch.rand(3 + mesh.rank)
    trainer.save()
    expected = torch.rand(5).tolist()
    torch.manual_seed(7)
    again = make_trainer(config_file, overrides)
    assert again.coefficients is None
    again.resume()
    return expected, torch.rand(5).tolist(), again.coefficients == COSTS


def save_while_everything_changes(config_file: str, overrides: list[str]) -> list[str]:
    """Rank 0 starts a save that cannot write before rank 1 joins, and changes all its tensors meanwhile.

    Returns:
        Names of rank 0's tensors that come back changed.
    """
    trainer = make_trainer(config_file, overrides)
    mesh = trainer.mesh
    for _ in trainer.train(COSTS, 2**34, 1):
        pass
    held = run_tensors(trainer.state)
    tensors = {(name, at): piece for name, part in held.items() for at, piece in part.pieces.items()}
    before = {key: local.clone() for key, local in tensors.items()}
    if mesh.rank == 0:
        trainer._saves._start(0.0)
        for local in tensors.values():
            local.add_(1.0)
    dist.barrier(group=mesh.control)
    trainer.save()
    load_checkpoint(trainer._checkpoints / "step-00000001", trainer.state)
    changed = [key for key, local in tensors.items() if not torch.equal(local, before[key])]
    return [name for name, _ in changed] if mesh.rank == 0 else []


def resume_error(config_file: str, overrides: list[str]) -> str:
    trainer = make_trainer(config_file, overrides)
    try:
        trainer.resume()
    except ConfigError as error:
        return str(error)
    return ""


def training_error(config_file: str, overrides: list[str]) -> str:
    trainer = make_trainer(config_file, overrides)
    try:
        for _ in trainer.train(COSTS, 2**34, 1):
            pass
    except DataError as error:
        return str(error)
    return ""


def steps_resumed_from(config_file: str, overrides: list[str], output_dirs: list[str]) -> int:
    """Steps done after a resume of ranks whose views of the output directory differ."""
    rank = dist.get_rank()
    trainer = make_trainer(config_file, [*overrides, f"train.output_dir={output_dirs[rank]}"])
    trainer.resume()
    return trainer.steps_done


def written_and_predicted_bytes(config_file: str, overrides: list[str]) -> tuple[int, int]:
    """Bytes of weights and optimizer state that this rank writes, and those predicted of the whole checkpoint."""
    trainer = make_trainer(config_file, overrides)
    mine = tensors_to_write(run_tensors(trainer.state), trainer.mesh)
    model, name = model_spec(trainer.config), trainer.config.optimizer.name
    return sum(one.num_bytes for one in mine.values()), checkpoint_bytes(model, has_muon=name == "muon")
