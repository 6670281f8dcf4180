"""Ranks of a run that goes on with fewer of them; chosen ones kill themselves at a chosen moment."""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from evenload.cli import train_worker
from evenload.cli.start_record import read_starts
from evenload.cli.train_worker import RunTask, run_worker
from evenload.config.train_config import load_train_config
from evenload.errors import CheckpointError, ConfigError, EvenloadError, RankLostError
from evenload.runtime.checkpoint.kept_steps import KeptStep, KeptSteps
from evenload.runtime.checkpoint.writer import CheckpointWriter
from evenload.runtime.comm.agreement import Agreement, agree
from evenload.runtime.comm.membership import Membership
from evenload.runtime.optim.optimizer import ShardedOptimizer
from evenload.runtime.replay.stage import PipelineStage
from evenload.runtime.stages.live_stages import LiveStages
from evenload.runtime.stages.state_arrival import StateArrival

PLACES = {
    "forward": (PipelineStage, "forward"),
    "backward": (PipelineStage, "backward"),
    "update": (ShardedOptimizer, "step"),
    "save": (CheckpointWriter, "_write"),
    "recovery": (Membership, "go_on"),
    "kept state": (KeptSteps, "write"),
    "mark": (KeptSteps, "mark"),
    "takeover": (KeptStep, "fill"),
    "switch": (LiveStages, "move_to"),
    "moving state": (StateArrival, "_move"),
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
    cache = Path(config.train.output_dir) / "costs"
    return run_worker(RunTask(config=config, cache=cache, command="the same command"), line)


def train_and_come_late(config_file: str, overrides: list[str], deaths: dict[int, tuple[str, int]], line) -> int:
    """As `train_and_die`; a process that comes in the place of another is not there before the others have gone on
    without it, and they go no further without somebody new who waits."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    directory = Path(load_train_config(Path(config_file), overrides).train.output_dir)
    if rank >= size:
        while len(read_starts(directory)) < 2:
            time.sleep(0.01)
    would_grow = train_worker._is_larger_with_others

    def grows(config, num_layers, members) -> bool:
        while members.round == 1 and not members.num_waiting:
            time.sleep(0.01)
        return would_grow(config, num_layers, members)

    train_worker._is_larger_with_others = grows
    return train_and_die(config_file, overrides, deaths, line)


def train_and_stick(config_file: str, overrides: list[str], stuck: int, line) -> int:
    """Train as a rank of our launcher, of which one gives up every first update, as if others were stuck."""

    def give_up(*_, **__):
        raise RankLostError("nothing for 600 s")

    if int(os.environ["RANK"]) == stuck:
        ShardedOptimizer.step = give_up
    config = load_train_config(Path(config_file), overrides)
    cache = Path(config.train.output_dir) / "costs"
    return run_worker(RunTask(config=config, cache=cache, command="the same command"), line)


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


def leave_while_a_thread_waits() -> None:
    """As one of two ranks that leave their groups at the same time, each with a thread that waits for the other."""
    members, has_ended = _membership(), threading.Event()

    def leave() -> None:
        group = dist.new_group([0, 1])
        dist.barrier()

        def wait() -> None:
            try:
                dist.recv(torch.zeros(1), 1 - members.rank, group=group)
            except RuntimeError:
                has_ended.set()

        threading.Thread(target=wait, daemon=True).start()
        raise RankLostError("a third one is gone")

    assert _error_of(members, leave) == "RankLostError: a third one is gone"
    assert has_ended.wait(60), "the thread would wait for its whole time limit"


def lose_a_rank_in_a_save() -> None:
    """As one of two ranks: one leaves, the other was waiting for it to write a checkpoint and knows no more."""
    members = _membership()

    def save() -> None:
        dist.barrier()
        if members.rank == 1:
            return
        try:
            dist.recv(torch.zeros(1), 1)
        except RuntimeError as broken:
            raise CheckpointError("not completed") from broken

    assert _error_of(members, save) == ("RankLostError: not completed" if members.rank == 0 else "")


def fail_by_itself() -> None:
    """As the only rank: its disk is full."""

    def save() -> None:
        raise CheckpointError("the disk is full")

    assert _error_of(_membership(), save) == "CheckpointError: the disk is full"


def _error_of(members: Membership, work: Callable[[], None]) -> str:
    """What comes out of the members' groups when work in them fails; "" = nothing."""
    try:
        with members.groups(600.0):
            work()
    except EvenloadError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _membership() -> Membership:
    here = os.environ
    return Membership(int(here["RANK"]), int(here["WORLD_SIZE"]), here["MASTER_ADDR"], int(here["MASTER_PORT"]))


def _deadly(function: Callable, calls_before: int) -> Callable:
    calls = [0]

    def dies(*arguments, **options):
        calls[0] += 1
        if calls[0] > calls_before:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **options)

    return dies
