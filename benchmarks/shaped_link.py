"""Benchmarks of processes on one machine over a link with a speed of its own.

Over loopback gloo is as fast as the cores that copy, so that transfers and packs are two names for the same seconds of
the same cores, and what is hidden depends on how the system deals them out. A network between machines moves bytes by
itself. This runs a benchmark in a network namespace whose loopback lets so many bits a second through, in both
directions together (Linux's token bucket filter; needs root): the sender's core copies into the queue once, and then
only the link works.

    python benchmarks/shaped_link.py 2gbit benchmarks/reduction.py [--quick] [--append]

Rows name the link (`link_name`).
"""

import os
import sys

_VARIABLE = "EVENLOAD_SHAPED_LINK"
# Loopback's packets are up to 64 KiB; a queue that drops none, because TCP waits for its own bytes in it.
_SHAPE = "ip link set lo up && tc qdisc add dev lo root tbf rate {rate} burst 512kb limit 256mb"


def link_name() -> str:
    """Of the link between the processes of this benchmark."""
    rate = os.environ.get(_VARIABLE)
    return "gloo" if rate is None else f"gloo over a link of {rate.removesuffix('gbit')} Gbit/s"


def main() -> None:
    """Replaces this process by the benchmark."""
    if len(sys.argv) < 3 or not sys.argv[1].endswith("gbit"):
        sys.exit("usage: python benchmarks/shaped_link.py <n>gbit <benchmark.py> [arguments]")
    rate, *command = sys.argv[1:]
    os.environ[_VARIABLE] = rate
    os.execvp(
        "unshare",
        ["unshare", "-n", "sh", "-c", f'{_SHAPE.format(rate=rate)} && exec "$@"', "sh", sys.executable, *command],
    )


if __name__ == "__main__":
    main()
