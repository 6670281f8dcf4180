"""A checkpoint that is written again: whenever the machine ends, the old one or the new one is found."""

import itertools
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from types import ModuleType

import pytest

from evenload.runtime.checkpoint import directory as checkpoint_directory
from evenload.runtime.checkpoint.directory import (
    PROGRESS_FILE,
    checkpoint_path,
    complete_checkpoints,
    latest_checkpoint,
    partial_path,
    prune_checkpoints,
    put_in_place,
    remove_leftovers,
)


class Killed(BaseException):
    """The process has ended."""


def run_until(line: int | None, modules: Collection[ModuleType], function: Callable[..., object], *arguments) -> bool:
    """Whether a function came to its end before that many lines of the modules had run; None = it may."""
    left, files = [line], {module.__file__ for module in modules}

    def trace(frame, event, argument):
        if frame.f_code.co_filename not in files:
            return None
        if event == "line" and left[0] is not None:
            if left[0] == 0:
                raise Killed
            left[0] -= 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function(*arguments)
    except Killed:
        return False
    finally:
        sys.settrace(before)
    return True


FILES = ("a.distcp", "b.distcp", "loader.json", PROGRESS_FILE)
STEP = 7


def write(path: Path, content: str) -> None:
    path.mkdir()
    for name in FILES:
        (path / name).write_text(content)


def save(directory: Path, content: str, keep: int) -> None:
    remove_leftovers(directory)
    write(partial_path(directory, STEP), content)
    put_in_place(partial_path(directory, STEP), checkpoint_path(directory, STEP))
    prune_checkpoints(directory, keep)


def require_one_whole(directory: Path, *contents: str) -> None:
    result = latest_checkpoint(directory)
    assert result is not None
    assert complete_checkpoints(directory)[-1:] == [result]
    assert {path.name for path in result.iterdir()} == set(FILES)
    (content,) = {path.read_text() for path in result.iterdir()}
    assert content in contents


def remove_file_by_file(path: Path) -> None:
    for file in sorted(path.iterdir()):
        file.unlink()
    path.rmdir()


@pytest.mark.parametrize("keep", [1, 2])
def test_wherever_a_save_ends_a_whole_checkpoint_is_found(tmp_path, keep, monkeypatch):
    """At every line of ours, and between any two files that are removed; then in the next save as well."""
    monkeypatch.setattr(checkpoint_directory.shutil, "rmtree", remove_file_by_file)
    modules = checkpoint_directory, sys.modules[__name__]
    for line in itertools.count():
        directory = tmp_path / str(line)
        directory.mkdir()
        write(checkpoint_path(directory, STEP - 1), "before")
        save(directory, "old", keep)
        was_whole = run_until(line, modules, save, directory, "new", keep)
        require_one_whole(directory, *(("new",) if was_whole else ("old", "new")))
        run_until(line // 2, modules, save, directory, "newer", keep)
        require_one_whole(directory, "old", "new", "newer")
        save(directory, "last", keep)
        require_one_whole(directory, "last")
        left = {checkpoint_path(directory, STEP - turn).name for turn in range(keep)}
        assert {path.name for path in directory.iterdir()} == left
        if was_whole:
            break
    assert line > 20


def test_what_was_moved_aside_is_resumed_from_by_its_own_number_and_gets_its_name_back(tmp_path):
    aside = tmp_path / f".step-{STEP:08d}.replaced"
    write(aside, "old")
    write(checkpoint_path(tmp_path, STEP - 1), "before")
    assert latest_checkpoint(tmp_path) == aside
    checkpoint_path(tmp_path, STEP).mkdir()  # without what makes it one
    assert latest_checkpoint(tmp_path) == aside
    remove_leftovers(tmp_path)
    assert complete_checkpoints(tmp_path) == [checkpoint_path(tmp_path, step) for step in (STEP - 1, STEP)]
    require_one_whole(tmp_path, "old")
