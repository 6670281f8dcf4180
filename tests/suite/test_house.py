"""The shape of the source: rooms that a reader can take in at a glance, and functions that fit on a screen."""

import ast
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src" / "evenload"

MAX_ENTRIES = 28
MAX_LINES, MAX_PARAMETERS = 80, 10
MAX_FILES, MAX_SOURCE_LINES = 250, 50_000


def too_large(source: str) -> list[str]:
    """Names of functions over a limit; parameters count whatever their kind, `self` and `*args` included."""
    return [
        node.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines(node) > MAX_LINES or parameters(node.args) > MAX_PARAMETERS)
    ]


def lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def parameters(arguments: ast.arguments) -> int:
    named = len(arguments.posonlyargs) + len(arguments.args) + len(arguments.kwonlyargs)
    return named + (arguments.vararg is not None) + (arguments.kwarg is not None)


@pytest.mark.parametrize("room", sorted({path.relative_to(SRC).parts[0] for path in SRC.glob("*/*.py")}))
def test_a_room_has_few_entries(room):
    # Folders that git has left behind hold compiled files only.
    files = {path.relative_to(SRC / room).parts[0] for path in (SRC / room).rglob("*.py")}
    entries = sorted(files - {"__init__.py"})
    assert len(entries) <= MAX_ENTRIES, entries


def test_the_whole_can_be_held_in_one_head():
    sources = [path.read_text().count("\n") for path in SRC.rglob("*.py")]
    assert len(sources) <= MAX_FILES
    assert sum(sources) <= MAX_SOURCE_LINES


def test_no_function_is_over_the_limits():
    result = {
        f"{path.relative_to(SRC).as_posix()}:{name}"
        for path in SRC.rglob("*.py")
        for name in too_large(path.read_text())
    }
    assert result == set(), "split these"
