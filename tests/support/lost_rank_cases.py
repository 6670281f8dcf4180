"""A rank of a training run in a process of its own; one of them is killed or stopped by a signal to itself."""

import os
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from dist_training import COSTS
from evenload.config.train_config import layout_of, load_train_config
from evenload.errors import EvenloadError
from evenload.planning.planner import StepPlanner
from evenload.runtime.comm.mesh import create_meshes
from evenload.runtime.model.model_config import model_spec
from evenload.runtime.replay.stage import PipelineStage
from evenload.runtime.trainer import Trainer

PLACES = {"transfer": (PipelineStage, "forward"), "planning": (StepPlanner, "propose")}
"""What the lost rank was about to call."""

STUCK = 0
"""Instead of a signal: the thread that calls never returns, the process lives."""


def run_rank(
    rank: int,
    port: int,
    directory: str,
    config_file: str,
    overrides: list[str],
    timeout_s: float,
    lost: int,
    place: str,
    how: int,
) -> None:
    """Train until the lost rank is lost; the others leave `error-<rank>.txt`."""
    torch.set_num_threads(1)
    config = load_train_config(Path(config_file), overrides)
    layout = layout_of(config.parallel, model_spec(config).num_layers)
    dist.init_process_group(
        "gloo",
        store=dist.TCPStore("localhost", port),
        rank=rank,
        world_size=layout.world_size,
        timeout=timedelta(seconds=300),
    )
    signs = dist.PrefixStore("signs", dist.TCPStore("localhost", port))
    if rank == lost:
        owner, name = PLACES[place]
        # The first steps go well, so that everything is under way.
        setattr(owner, name, _lose(getattr(owner, name), os.getpid(), how, calls_before=4))
    try:
        mesh = create_meshes([layout], torch.device("cpu"), timeout_s, signs=signs).start
        for _ in Trainer(config, mesh).train(COSTS, 2**34):
            pass
        outcome = "the run ended as if nothing had happened"
    except EvenloadError as error:
        outcome = f"{type(error).__name__}: {error}"
    except BaseException:
        outcome = traceback.format_exc()
    Path(f"{directory}/error-{rank}.txt").write_text(outcome)
    os._exit(0)


def _lose(function: Callable, pid: int, how: int, calls_before: int) -> Callable:
    calls = [0]

    def lost(*arguments, **options):
        calls[0] += 1
        if calls[0] > calls_before:
            if how == STUCK:
                threading.Event().wait()
            # What travels behind compute arrives first, so that the others always wait for the same.
            time.sleep(1.0)
            os.kill(pid, how)
        return function(*arguments, **options)

    return lost
