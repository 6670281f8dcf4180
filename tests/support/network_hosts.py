"""Two "hosts" on this machine: network namespaces with a cable between them, which can be cut and joined again.

    host a  10.77.0.1 == veth ============ veth == 10.77.0.2  host b

Linux, as root. `cut` has two ways. "down" takes the cable's end of one host down: that host knows at once, the other
one hears nothing more. "silent" lets both send into nowhere (neighbours' hardware addresses are wrong), as where a
switch between two machines fails: no interface changes, nothing is refused, nothing is answered.
"""

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

Cut = Literal["down", "silent"]

_PREFIX = "evenload"
_NOBODY = "02:00:00:00:00:99"
_TCP_RETRIES = 6
"""TCP gives up after about 25 s without an answer, in place of a quarter of an hour (`net.ipv4.tcp_retries2`)."""


class NetworkHosts:
    """Names and addresses of both, and their cable."""

    def __init__(self, name: str, *, is_swapped: bool) -> None:
        self.names = (f"{name}a", f"{name}b")
        self.addresses = ("10.77.0.2", "10.77.0.1") if is_swapped else ("10.77.0.1", "10.77.0.2")
        self.interfaces = ("evcable-a", "evcable-b")
        self._is_cut_by: Cut | None = None

    def command_on(self, host: int, *command: str) -> list[str]:
        """What to run for a command to run on a host."""
        return ["ip", "netns", "exec", self.names[host], *command]

    def cut(self, how: Cut) -> None:
        self._is_cut_by = how
        if how == "down":
            _ip("-n", self.names[1], "link", "set", self.interfaces[1], "down")
            return
        for host in (0, 1):
            there = (self.addresses[1 - host], "dev", self.interfaces[host])
            _ip("-n", self.names[host], "neigh", "replace", *there, "lladdr", _NOBODY, "nud", "permanent")

    def join(self) -> None:
        """The cable works again."""
        how, self._is_cut_by = self._is_cut_by, None
        if how == "down":
            _ip("-n", self.names[1], "link", "set", self.interfaces[1], "up")
        for host in (0, 1) if how == "silent" else ():
            there = (self.addresses[1 - host], "dev", self.interfaces[host])
            _ip("-n", self.names[host], "neigh", "del", *there)


@contextmanager
def network_hosts(*, is_swapped: bool = False) -> Iterator[NetworkHosts]:
    """Both, and their end with all that is in them, whatever happened.

    Args:
        is_swapped: host b has the lower address: torchrun's ranks begin there.
    """
    _remove_left_over()
    hosts = NetworkHosts(f"{_PREFIX}{os.getpid()}", is_swapped=is_swapped)
    try:
        for name in hosts.names:
            _ip("netns", "add", name)
        (a, b), (end_a, end_b) = hosts.names, hosts.interfaces
        _ip("link", "add", end_a, "netns", a, "type", "veth", "peer", "name", end_b, "netns", b)
        for name, end, address in zip(hosts.names, hosts.interfaces, hosts.addresses, strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", end, "up")
            subprocess.run(
                ["ip", "netns", "exec", name, "sysctl", "-qw", f"net.ipv4.tcp_retries2={_TCP_RETRIES}"],
                check=True,
                capture_output=True,
            )
        yield hosts
    finally:
        for name in hosts.names:
            _remove(name)


def why_not() -> str:
    """Why there can be no such hosts here; "" = there can."""
    try:
        with network_hosts():
            return ""
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", None) or ""
        return f"no network namespaces here ({said.strip() or error})"


def _remove(name: str) -> None:
    """A host, with its end of the cable and all processes on it; nothing where there is none."""
    with suppress(subprocess.CalledProcessError):
        for pid in _ip("netns", "pids", name).split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        _ip("netns", "del", name)


def _remove_left_over() -> None:
    """Hosts of tests that were killed."""
    for line in _ip("netns", "list").splitlines():
        found = re.match(rf"({_PREFIX}(\d+)[ab])\b", line)
        if found and not Path(f"/proc/{found[2]}").exists():
            _remove(found[1])


def _ip(*arguments: str) -> str:
    """What it prints."""
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout
