"""Ranks of a run that goes on with fewer of them; chosen ones kill themselves at a chosen moment."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from evenload.cli.train_worker import run_worker
from evenload.errors import ConfigError
from evenload.runtime.checkpoint.writer import CheckpointWriter
from evenload.runtime.comm.agreement import Agreement, agree
from evenload.runtime.comm.membership import Membership
from evenload.runtime.config.train_config import load_train_config
from evenload.runtime.optim.optimizer import ShardedAdamW
from evenload.runtime.replay.stage import PipelineStage

PLACES = {
    "forward": (PipelineStage, "forward"),
    "backward": (PipelineStage, "backward"),
    "update": (ShardedAdamW, "step"),
    "save": (CheckpointWriter, "_write"),
    "recovery": (Membership, "go_on"),
}
"""What a rank is about to call when it dies."""


def train_and_die(config_file: str, overrides: list[str], deaths: dict[int, tuple[str, int]], line) -> int:
    """Train as a rank of our launcher.

    Args:
        deaths: by rank, the place and how many calls go well there.
    """
    rank = int(os.environ["RANK"])
    if rank in deaths:
        place, calls_before = deaths[rank]
        owner, name = PLACES[place]
        setattr(owner, name, _deadly(getattr(owner, name), calls_before))
    config = load_train_config(Path(config_file), overrides)
    return run_worker(config, Path(config.train.output_dir) / "costs", "the same command", line)


def die(line) -> int:
    """As a rank: gone at once."""
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


def refuse(wrong: int, line) -> int:
    """As a rank: one of them has an error."""
    if int(os.environ["RANK"]) == wrong:
        raise ConfigError("wrong on purpose")
    return 0


def leave_out(other: int, line) -> int:
    """As a rank: decide that another one is left out, which never notices."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank == other:
        time.sleep(600)
    else:
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        agree(Agreement(store, 1, tuple(range(size)), rank, patience_s=0.2))
    return 0


def _deadly(function: Callable, calls_before: int) -> Callable:
    calls = [0]

    def dies(*arguments, **options):
        calls[0] += 1
        if calls[0] > calls_before:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **options)

    return dies
