"""What docs/plan.md shows of `evenload plan` and `evenload lengths`.

    python tools/make_guide.py [--without-search]      part of `make docs`; minutes, nearly all of them the search

Every block stands between two comments of the page and is made anew from the command that the page names: the output
as a terminal of the page's width shows it. The search has two hours, so that it ends by itself on any machine and the
page says the same. A test runs everything but the search and compares; of the search it runs the winner.
"""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
import textwrap
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "plan.md"
TABLE = "examples/lengths/github_dirs.npy.gz"
SIZES = ("--documents", "512", "--steps", "4")
MODEL = ("--model", "llama-13b", "--cluster", "h100x64")
CONTEXT = ("--context", "131072", "--overlong", "truncate", *SIZES)
FIRST = ("plan", "examples/lengths/stdlib.npy.gz", "--model", "qwen3-8b", "--cluster", "h100x8")
STRATEGIES = ("plan", TABLE, *MODEL, "--layout", "dp=4,pp=4,tp=4", *CONTEXT,
              "--strategy", "padded,best_fit,fixed_greedy,balanced,wlb,slimpack,auto")  # fmt: skip
# However slow the machine: a page does not depend on it.
SEARCH = ("plan", TABLE, *MODEL, "--search-layout", "--search-seconds", "7200", *CONTEXT,
          "--strategy", "best_fit,slimpack,auto")  # fmt: skip
LENGTHS = ("lengths", TABLE, "--window", "131072")
STEPS = ("plan", "--lengths-per-step", "examples/lengths/recorded_steps.jsonl", "--model", "llama3-8b")
WIDTH = 118


def main() -> None:
    """The page."""
    put(cheap_blocks())
    if "--without-search" not in sys.argv[1:]:
        layouts, judged = output_parts(run(SEARCH))
        # Names the layout that wins, for `winner`.
        put({"layouts output": fenced(layouts), "winner output": judged})
    put({"winner output": winner_output()})


def cheap_blocks() -> dict[str, str]:
    """Blocks that seconds suffice for."""
    lengths = run(LENGTHS).partition("\n\n")[0]
    return {
        "first output": fenced(run(FIRST)),
        "lengths output": fenced(lengths),
        "strategies output": fenced(run(STRATEGIES)),
        "steps output": fenced(run(STEPS)),
    }


def winner_output() -> str:
    """The comparison in the layout that the page says won the search."""
    return fenced(run(winner(PAGE.read_text(encoding="utf-8"))))


def run(arguments: tuple[str, ...]) -> str:
    """What a command prints in a terminal of the page's width.

    Raises:
        SystemExit: the command failed.
    """
    command = [sys.executable, "-m", "evenload.cli.main", *arguments]
    terminal, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 60, WIDTH, 0, 0))
    environment = {key: value for key, value in os.environ.items() if key != "FORCE_COLOR"}
    environment |= {"TERM": "dumb", "NO_COLOR": "1", "COLUMNS": str(WIDTH), "LINES": "60"}
    process = subprocess.Popen(command, cwd=ROOT, stdout=end, stderr=subprocess.DEVNULL, env=environment)
    os.close(end)
    output = read_all(terminal)
    if process.wait():
        sys.exit(f"tools/make_guide.py: {' '.join(command)} ended with {process.returncode}")
    # A terminal breaks the lines that the command does not.
    lines = (
        textwrap.wrap(line, WIDTH) or [""] if len(line) > WIDTH else [line.rstrip()] for line in output.splitlines()
    )
    return "\n".join(line.rstrip() for parts in lines for line in parts).strip("\n")


def read_all(terminal: int) -> str:
    """Everything a process writes to its terminal; Linux says EIO at the end."""
    parts = []
    while True:
        try:
            part = os.read(terminal, 65536)
        except OSError:
            part = b""
        if not part:
            os.close(terminal)
            return b"".join(parts).decode()
        parts.append(part)


def output_parts(output: str) -> tuple[str, str]:
    """The layouts, and what was planned: the line that names the layout that won."""
    start = output.index("layout of each strategy: ")
    layouts, begin, planned = output[start:].partition("\nevenload ")
    return layouts, begin.strip("\n") + planned


def fenced(text: str) -> str:
    """As a block of code."""
    return f"```\n{text.rstrip()}\n```\n"


def block_of(page: str, name: str) -> str:
    """What stands between the comments of a block.

    Raises:
        SystemExit: the page has no such block.
    """
    return _parts(page, name)[1]


def winner(page: str) -> tuple[str, ...]:
    """The command that plans in the layout that the page says won the search, without searching."""
    layout = block_of(page, "winner output").partition(", layout ")[2].partition(", ")[0].split()
    search = list(SEARCH)
    at = search.index("--search-layout")
    return (*search[:at], "--layout", ",".join(layout), *search[at + 3 :])  # without --search-seconds and its number


def put(blocks: Mapping[str, str]) -> None:
    """Write the blocks into the page."""
    text = PAGE.read_text(encoding="utf-8")
    for name, block in blocks.items():
        before, _, after = _parts(text, name)
        text = before + block + after
    PAGE.write_text(text, encoding="utf-8")


def _parts(text: str, name: str) -> tuple[str, str, str]:
    begin, end = f"<!-- {name}: make docs -->\n", f"<!-- end of {name} -->\n"
    if text.count(begin) != 1 or text.count(end) != 1:
        sys.exit(f"tools/make_guide.py: a page must have '{begin.strip()}' and '{end.strip()}' once each")
    start, stop = text.index(begin) + len(begin), text.index(end)
    return text[:start], text[start:stop], text[stop:]


if __name__ == "__main__":
    main()
