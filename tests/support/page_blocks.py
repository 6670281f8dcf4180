"""Blocks of a page of documentation, and what becomes of them when a reader follows the page.

A fenced block behind `<!-- file: NAME -->` is a file that the reader saves, `sh` is typed, `python` is run, block after
block in one session; one behind `<!-- not run: REASON -->` is shown only.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
_BLOCK = re.compile(
    r"(?:^<!-- (?P<kind>file|not run): (?P<said>.+?) -->\n)?^```(?P<language>\w+)\n(?P<text>.*?)^```$",
    flags=re.M | re.S,
)


class Block(NamedTuple):
    """A fenced block: its language, its text, and what the comment before it says."""

    language: str
    text: str
    file: str | None
    not_run: str | None


def blocks_of(page: Path) -> Iterator[Block]:
    """Blocks with a language, in order."""
    for found in _BLOCK.finditer(page.read_text(encoding="utf-8")):
        said = {found["kind"]: found["said"]}
        yield Block(found["language"], found["text"], said.get("file"), said.get("not run"))


def commands_in(text: str) -> Iterator[str]:
    """Lines of a shell block, continued ones joined, without comments."""
    for line in text.replace("\\\n", " ").splitlines():
        line = re.sub(r"(^|\s)#.*$", "", line).strip()
        if line:
            yield " ".join(line.split())


def reader_in(folder: Path) -> dict[str, str]:
    """The repository's root as a reader sees it, without writing there; gives the environment of commands.

    Recipes train on `docs`, and a run whose sources changed does not go on: that folder is a copy, so that somebody who
    edits a page meanwhile does not fail the test.
    """
    shutil.copytree(ROOT / "docs", folder / "docs", ignore=shutil.ignore_patterns("pictures"))
    (folder / "examples").symlink_to(ROOT / "examples")
    programs = folder / ".programs"
    programs.mkdir()
    evenload = programs / "evenload"
    evenload.write_text(f'#!/bin/sh\nexec {sys.executable} -m evenload "$@"\n')
    evenload.chmod(0o755)
    return os.environ | {"PATH": f"{programs}:{os.environ['PATH']}", "COLUMNS": "118", "OMP_NUM_THREADS": "1"}


def follow(page: Path, folder: Path, *, shell: bool = True) -> list[str]:
    """Save, type and run everything that the page asks for, in order; gives what was done.

    Args:
        shell: type commands, too; else only files are saved.

    Raises:
        AssertionError: a command or the Python of a block fails, with its output.
    """
    environment, done, python = reader_in(folder), [], []
    for block in blocks_of(page):
        if block.file:
            (folder / block.file).write_text(block.text, encoding="utf-8")
            done.append(block.file)
        elif block.not_run is None and block.language == "sh" and shell:
            run(["bash", "-euo", "pipefail", "-c", block.text], folder, environment)
            done += commands_in(block.text)
        elif block.not_run is None and block.language == "python" and shell:
            # A session goes on where the block before left it.
            python.append(block.text)
            run([sys.executable, "-c", "\n".join(python)], folder, environment)
            done.append("python")
    return done


def run(command: list[str], folder: Path, environment: dict[str, str]) -> None:
    """Run it; an `AssertionError` with its output where it fails."""
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, f"{command[-1]}\n{ended.stdout[-3000:]}\n{ended.stderr[-3000:]}"
