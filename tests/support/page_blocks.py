"""Blocks of a page of documentation, and what becomes of them when a reader follows the page.

A fenced block behind `<!-- file: NAME -->` is a file that the reader saves, `sh` and `console` are typed, `python` is
run, block after block in one session; one behind `<!-- not run: REASON -->` is shown only.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
SHELL = ("sh", "console")
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

    @property
    def is_done(self) -> bool:
        """A reader does something with it."""
        return self.file is not None or (self.not_run is None and self.language in (*SHELL, "python"))


def blocks_of(page: Path) -> Iterator[Block]:
    """Blocks with a language, in order."""
    for result in _BLOCK.finditer(page.read_text(encoding="utf-8")):
        output = {result["kind"]: result["said"]}
        yield Block(result["language"], result["text"], output.get("file"), output.get("not run"))


def name_of(page: Path) -> str:
    """As links have it, from the root."""
    return page.relative_to(ROOT).as_posix()


def commands_in(text: str) -> Iterator[str]:
    """Lines of a shell block, continued ones joined, without comments."""
    for line in text.replace("\\\n", " ").splitlines():
        line = re.sub(r"(^|\s)#.*$", "", line).strip()
        if line:
            yield " ".join(line.split())


def reader_in(folder: Path, *, quick: bool = False) -> dict[str, str]:
    """The repository's root as a reader sees it, without writing there; gives the environment of commands, which
    calibrate in a fraction of the time where they are `quick`. Recipes train on a copy of `docs`, so that somebody who
    edits a page meanwhile does not fail the test."""
    shutil.copytree(ROOT / "docs", folder / "docs", ignore=shutil.ignore_patterns("pictures"))
    (folder / "examples").symlink_to(ROOT / "examples")
    programs = folder / ".programs"
    programs.mkdir()
    evenload = ("-c", "import quick_commands; quick_commands.main()") if quick else ("-m", "evenload")
    for name, words in (("evenload", evenload), ("python", ())):
        program = programs / name
        program.write_text(f'#!/bin/sh\nexec {shlex.join((sys.executable, *words))} "$@"\n')
        program.chmod(0o755)
    paths = filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH")))
    return os.environ | {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(paths),
        "XDG_CACHE_HOME": str(folder / ".cache"),
        "COLUMNS": "118",
        "OMP_NUM_THREADS": "1",
    }


PAGES = (
    *(ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))),
    *(*sorted((ROOT / "docs" / "howto").glob("*.md")), *sorted((ROOT / "examples").rglob("*.md"))),
)
FOLLOWED = tuple(page for page in PAGES if any(block.is_done for block in blocks_of(page)))
"""Pages on which a reader does something."""


class Reader:
    """Somebody at a terminal in a folder that `reader_in` made: a shell, and a session of Python."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder, self.environment = folder, environment
        self._session: list[str] = []

    def type(self, text: str) -> None:
        """Lines of shell; an `AssertionError` with its output where one fails."""
        run(["bash", "-euo", "pipefail", "-c", text], self.folder, self.environment)

    def python(self, text: str) -> None:
        """A block of Python; the session goes on where the block before left it."""
        self._session.append(text)
        run([sys.executable, "-c", "\n".join(self._session)], self.folder, self.environment)


class ReaderHere(Reader):
    """The same in this process, which has imported everything, as have the ranks that it starts; `commands` run a
    program with the other words of a line and give its exit code."""

    def __init__(
        self, folder: Path, environment: dict[str, str], commands: dict[str, Callable[[list[str]], int]]
    ) -> None:
        super().__init__(folder, environment)
        self._commands, self._names = commands, {"__name__": "__main__"}

    def type(self, text: str) -> None:
        """Lines of shell; those of other programs, or with more than words, in a shell."""
        for line in commands_in(text):
            name, *words = shlex.split(line)
            if name not in self._commands or re.search(r"[|<>&;$`]", line):
                super().type(line)
            else:
                code = self._commands[name](words)
                assert code == 0, f"{line}\nexit code {code}"

    def python(self, text: str) -> None:
        """A block of Python."""
        exec(compile(text, "a block of the page", "exec"), self._names)


def follow(blocks: Iterable[Block], reader: Reader) -> list[str]:
    """Save, type and run everything that a page asks for, in order; gives what was done."""
    done = []
    for block in blocks:
        if not block.is_done:
            continue
        if block.file:
            (reader.folder / block.file).write_text(block.text, encoding="utf-8")
            done.append(block.file)
        elif block.language == "python":
            reader.python(block.text)
            done.append("python")
        else:
            reader.type(block.text)
            done += commands_in(block.text)
    return done


def save_files(blocks: Iterable[Block], folder: Path) -> list[str]:
    """Only what a reader saves."""
    return follow((block for block in blocks if block.file), Reader(folder, {}))


def run(command: list[str], folder: Path, environment: dict[str, str]) -> None:
    """Run it; an `AssertionError` with its output where it fails."""
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, f"{command[-1]}\n{ended.stdout[-3000:]}\n{ended.stderr[-3000:]}"
