"""One rank of `evenload train` under torchrun whose machines come and go (`train.on_lost_rank = "shrink"`).

torchrun's agent, one a machine, never lets a rank outlive the loss of another: it ends those of its machine, meets the
agents that are left, and starts ranks again, as many as these machines have together. So a rank has four duties:

    loss     give up what it waits for within `train.timeout_s`, and end at once, so that its agent acts
    cut off  end also where nothing answers any more, not even the store through which ranks met (`Lifeline`)
    start    take the layout that fits the ranks that there are (`fitted_config`), go on from the latest checkpoint, and
             say so
    return   where a machine comes back, agents send SIGTERM: the running step is finished and saved, none is repeated

The store has to be a new one for every start. torchrun has its agents keep one unless told otherwise, in which a start
finds what the one before it left, and whose address an agent keeps when the machine that holds it is gone; so it has to
be told (torch 2.13, `DynamicRendezvousHandler.next_rendezvous`).
"""

import os
import sys
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from evenload.cli.start_record import read_starts
from evenload.cli.stop_request import StopRequest
from evenload.cli.train_worker import RunTask, note_start, saved_steps, train_as_rank
from evenload.cli.worker_setup import started_rank
from evenload.config.layouts import fitted_config, layouts_of
from evenload.config.train_config import TrainConfig, layout_of
from evenload.errors import ConfigError, RankLostError
from evenload.runtime.comm.lifeline import Lifeline
from evenload.runtime.comm.watch import comes_of_transport
from evenload.runtime.model.configured import model_spec
from evenload.types.counted import counted

_MARGIN_S = 15.0
"""After `train.timeout_s`, for an error that names who is lost: it says more than a silent store."""


def run_elastic_worker(task: RunTask) -> int:
    """As `train_worker.run_worker`. Where ranks are lost this process is ended, not this function.

    Raises:
        ConfigError: settings that do not go together, a torchrun that keeps its store, or more ranks than the layout
            has places.
    """
    config = task.config
    require_elastic(config)
    num_layers, world_size = model_spec(config).num_layers, int(os.environ["WORLD_SIZE"])
    full = layout_of(config, num_layers)
    if world_size > full.world_size:
        raise ConfigError(
            f"torchrun has started {counted(world_size, 'rank')}, layout {full.describe()} has {full.world_size}; "
            "lower --nnodes or --nproc-per-node, or raise parallel.dp / cp / pp / tp"
        )
    now = fitted_config(config, num_layers, world_size)
    layouts = layouts_of(now, num_layers)
    if not _takes_part(layouts[0].world_size):
        return 0
    limit_s = config.train.timeout_s
    lifeline = Lifeline(partial(_connect, limit_s), limit_s + _MARGIN_S, _end_at_once)
    try:
        with started_rank(now, *layouts) as setup:
            if setup.mesh.rank == 0:
                is_first = not read_starts(Path(config.train.output_dir))
                note_start(now, layouts[0], saved_steps(now), "" if is_first else "started again by torchrun")
            return train_as_rank(task.of(now), setup, StopRequest()) or 0
    except Exception as error:
        if isinstance(error, RankLostError) or comes_of_transport(error):
            # Threads and groups may wait for ranks that are gone; the agent waits for this process.
            _end_at_once(" ".join(str(error).split()))
        raise
    finally:
        lifeline.close()


def require_elastic(config: TrainConfig) -> None:
    """Refuse what does not go together with starts after a loss; `ConfigError`."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):
        raise ConfigError(
            "train.on_lost_rank is 'shrink' under a torchrun that keeps one store for all starts, in which ranks that "
            "are started again find what the lost ones left; give torchrun TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its "
            "environment, on every machine"
        )
    if config.train.replace_lost_ranks:
        raise ConfigError(
            f"train.replace_lost_ranks is {config.train.replace_lost_ranks}, but under torchrun its agents start "
            "processes again; leave it out and give torchrun --max-restarts"
        )
    if config.train.survivor_memory == "shared":
        raise ConfigError(
            "train.survivor_memory is 'shared' under torchrun, whose agents end all processes of a machine and start "
            "others, which go on from the last checkpoint; leave it out, or start without torchrun"
        )
    if not config.train.resume:
        raise ConfigError(
            "train.resume is off and train.on_lost_rank 'shrink': under torchrun a start after a loss looks like any "
            "other and goes on from the latest checkpoint; leave train.resume on, and begin anew in another "
            "train.output_dir"
        )


def _takes_part(num_ranks: int) -> bool:
    """Whether this rank has a place among so many, all that are started from now on; the last ones may have none."""
    here = os.environ
    rank, first_here = int(here["RANK"]), int(here["RANK"]) - int(here["LOCAL_RANK"])
    if rank >= num_ranks:
        return False
    here["WORLD_SIZE"] = str(num_ranks)
    # Cores and memory of the machine are divided by those that train on it.
    here["LOCAL_WORLD_SIZE"] = str(min(int(here["LOCAL_WORLD_SIZE"]), num_ranks - first_here))
    return True


def _connect(timeout_s: float) -> dist.Store:  # type: ignore[reportPrivateImportUsage]
    """A connection of its own to the store through which ranks meet, which rank 0 makes."""
    return dist.TCPStore(  # type: ignore[reportPrivateImportUsage]
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
    )


def _end_at_once(lost: str) -> NoReturn:
    """Say why and end, with the exit code of `RankLostError`, whatever still waits in this process."""
    sys.stderr.write(f"evenload: error: {lost}\n")
    sys.stderr.flush()
    sys.stdout.flush()
    os._exit(RankLostError.exit_code)
