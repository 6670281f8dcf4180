"""`evenload train` under torchrun on two "hosts" whose cable is cut at some moment, and perhaps joined again.

    host 0   holds torchrun's rendezvous, so it is the side that can go on
    host 1   is cut off: its ranks end, and its torchrun, which has no rendezvous any more

As a scheduler does, the case starts torchrun on host 1 again once it has ended there, where the cable is joined.
"""

import os
import random
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from network_hosts import Cut, NetworkHosts
from process_tree import family_of

TIMEOUT_S = 12.0
"""`train.timeout_s`: more than a step takes on a machine where others compute, too."""
DEADLINE_S = 300.0
NEW_STORES = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""In torchrun's environment: what `evenload train` asks for where ranks may be lost."""
_PORT = 29411
# Agents notice a dead one after 4 s, and wait 3 s for others before they start with those that are there.
_RENDEZVOUS = "keep_alive_interval=1,keep_alive_max_attempt=4,last_call_timeout=3,read_timeout=30"


@dataclass(frozen=True)
class CutCase:
    """One run.

    Args:
        seed: of the moment: after how many rows of metrics, and how long after the last one.
        how: the cable is cut.
        returns: it is joined again, and host 1 comes back.
        leads: the host of rank 0, of the store through which ranks meet, and of who writes metrics.
    """

    seed: int
    how: Cut
    returns: bool
    leads: int

    def moment(self, steps: int) -> tuple[int, float]:
        """Rows of metrics that are there, and seconds after that; in the first third of the run. -1 rows: while it
        starts."""
        chance = random.Random(self.seed)
        if self.seed % 5 == 4:
            return -1, chance.uniform(0.0, 15.0)
        return chance.randrange(steps // 3), chance.uniform(0.0, 1.0)


@dataclass(frozen=True)
class CutOutcome:
    """What became of it.

    Args:
        codes: exit codes of torchrun on host 0, and on host 1 where it was cut off.
        went_on_s, ended_s: after the cut, until host 0 had trained another step; until host 1 had ended with all its
            processes.
        took_s: in all.
        logs: of host 0, host 1, and of host 1 when it had come back.
    """

    codes: tuple[int, int]
    went_on_s: float
    ended_s: float
    took_s: float
    logs: tuple[str, str, str]


def run_cut(hosts: NetworkHosts, case: CutCase, directory: Path, arguments: list[str], steps: int) -> CutOutcome:
    """Train to the end, with a cut on the way.

    Args:
        directory: has config.toml, whose `train.output_dir` is `run` in it; gets logs.
        arguments: of `evenload train`.

    Raises:
        TimeoutError: something did not end within `DEADLINE_S`.
    """
    metrics, from_s = directory / "run" / "metrics.jsonl", time.monotonic()
    processes = [_start(hosts, host, directory, f"host-{host}", arguments) for host in (0, 1)]
    try:
        rows, later_s = case.moment(steps)
        _until(lambda: _rows(metrics) > rows or any(process.poll() is not None for process in processes), "steps")
        time.sleep(later_s)
        hosts.cut(case.how)
        cut_s, before = time.monotonic(), _rows(metrics)
        family = family_of(processes[1].pid)
        went_on_s = ended_s = 0.0

        def look() -> bool:
            nonlocal went_on_s, ended_s
            now_s = time.monotonic() - cut_s
            # A row or two may be on their way when the cable is cut.
            if not went_on_s and _rows(metrics) > before + 2:
                went_on_s = now_s
            if not ended_s and processes[1].poll() is not None and not any(map(_lives, family)):
                ended_s = now_s
            return bool(went_on_s and ended_s) or processes[0].poll() is not None

        _until(look, "both sides of the cut")
        _until(lambda: processes[1].poll() is not None, "the side that was cut off")
        if case.returns:
            hosts.join()
            processes.append(_start(hosts, 1, directory, "host-1-again", arguments))
        _until(lambda: processes[0].poll() is not None, "the side that goes on")
        if case.returns:
            _until(lambda: processes[2].poll() is not None, "the side that came back")
        ended_s = ended_s or time.monotonic() - cut_s
        names = ("host-0", "host-1", "host-1-again")
        logs = [file.read_text() if (file := directory / f"{name}.log").is_file() else "" for name in names]
        return CutOutcome(
            codes=(processes[0].returncode, processes[1].returncode),
            went_on_s=went_on_s,
            ended_s=ended_s,
            took_s=time.monotonic() - from_s,
            logs=(logs[0], logs[1], logs[2]),
        )
    finally:
        for process in processes:
            for pid in [process.pid, *family_of(process.pid)] if process.poll() is None else ():
                _kill(pid)
            process.wait()


def _start(hosts: NetworkHosts, host: int, directory: Path, name: str, arguments: list[str]) -> subprocess.Popen:
    torchrun = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=2", "--max-restarts=5"),
        *("--rdzv-backend=c10d", f"--rdzv-endpoint={hosts.addresses[0]}:{_PORT}", f"--rdzv-id={directory.name}"),
        f"--rdzv-conf=is_host={int(host == 0)},{_RENDEZVOUS}",
        f"--local-addr={hosts.addresses[host]}",
        *("-m", "evenload.cli.main", "train", "config.toml", *arguments),
    ]
    environment = os.environ | {
        "GLOO_SOCKET_IFNAME": hosts.interfaces[host],
        "OMP_NUM_THREADS": "1",
        **NEW_STORES,
    }
    with open(directory / f"{name}.log", "w") as log:
        return subprocess.Popen(
            hosts.command_on(host, *torchrun), cwd=directory, env=environment, stdout=log, stderr=subprocess.STDOUT
        )


def _rows(metrics: Path) -> int:
    return metrics.read_bytes().count(b"\n") if metrics.is_file() else 0


def _until(is_so, what: str) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not is_so():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"nothing for {DEADLINE_S:.0f} s: {what}")
        time.sleep(0.1)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):  # it has ended meanwhile
        os.kill(pid, 9)
