"""Processes on two "hosts" (`network_hosts`) that wait for each other, or for a store, when their cable is cut."""

import ctypes
import os
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from evenload.errors import RankLostError
from evenload.runtime.comm.lifeline import Lifeline
from evenload.runtime.comm.watch import RankWatch

LIMIT_S = 4.0
PORT = 29422
_CLONE_NEWNET = 0x40000000


def wait_for_the_other(rank: int, host: str, interface: str, address: str, directory: str) -> None:
    """As one of two ranks, of which rank 0 holds the store: meet, then wait for a tensor that never comes; what came of
    it stands in `said-<rank>`."""
    _go_to(host)
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    store = dist.TCPStore(address, PORT, is_master=rank == 0, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=LIMIT_S))
    watch = RankWatch(rank, f"rank {rank}", 2, dist.PrefixStore("signs", _connection(address)))
    dist.barrier()
    _say(directory, f"met-{rank}", "")
    try:
        with watch.waiting("the loss of step 7", "the other rank"):
            dist.recv(torch.zeros(1), 1 - rank)
        _say(directory, f"said-{rank}", "it came")
    except RankLostError as error:
        _say(directory, f"said-{rank}", str(error))
    os._exit(0)


def ask_the_store(host: str, address: str, directory: str) -> None:
    """Ask again and again, in calls that have no time limit; `said-asks` is what the lifeline says."""
    _go_to(host)

    def end(text: str) -> None:
        _say(directory, "said-asks", text)
        os._exit(0)

    Lifeline(lambda: _connection(address), LIMIT_S, end)
    store = _connection(address)
    while True:
        store.check(["a key"])
        _say(directory, "met-asks", "")
        time.sleep(0.01)


def _go_to(host: str) -> None:
    """From now on this process's sockets are that host's."""
    with open(f"/run/netns/{host}") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter network namespace {host}")


def _connection(address: str) -> dist.Store:
    return dist.TCPStore(address, PORT, is_master=False, wait_for_workers=False)


def _say(directory: str, name: str, text: str) -> None:
    (Path(directory) / f".{name}").write_text(text)
    os.replace(Path(directory) / f".{name}", Path(directory) / name)
