"""The site builds without a dead link, and every public name of the Python API is on its pages, with a docstring."""

import ast
import fnmatch
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import evenload

ROOT = Path(__file__).resolve().parents[2]
SITE = runpy.run_path(str(ROOT / "tools" / "docs_site.py"))


def modules():
    return [module for name in SITE["API"] for module in SITE["public_modules"](name)]


def file_of(module):
    path = ROOT / "src" / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def public(body):
    """Classes and functions of a body that others may call; of a class the methods, too."""
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
            yield node.name, node
            if isinstance(node, ast.ClassDef):
                yield from ((f"{node.name}.{name}", inner) for name, inner in public(node.body))


@pytest.mark.parametrize("module", modules())
def test_every_public_name_has_a_docstring(module):
    tree = ast.parse(file_of(module).read_text(encoding="utf-8"))
    assert ast.get_docstring(tree), module
    missing = [name for name, node in public(tree.body) if not ast.get_docstring(node) and not overrides(node)]
    assert missing == []


@pytest.mark.long
def test_the_site_builds_without_a_dead_link_and_holds_every_public_name(tmp_path):
    """Every warning of mkdocs is an error (mkdocs.yml: strict); a name that can be linked to is there."""
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", tmp_path / "site"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    missing = []
    for page in SITE["API"]:
        text = (tmp_path / "site" / "reference" / f"{page}.html").read_text(encoding="utf-8")
        anchors = set(re.findall(r'\bid="(evenload[\w.]*)"', text))
        for module in SITE["public_modules"](page):
            tree = ast.parse(file_of(module).read_text(encoding="utf-8"))
            names = [f"{module}.{name}" for name, node in public(tree.body) if not overrides(node)]
            missing += [name for name in (module, *names) if name not in anchors]
    assert missing == []


def overrides(node):
    """A method that says it is another's: the docstring is there."""
    return any("override" in ast.unparse(decorator) for decorator in node.decorator_list)


def test_the_pages_hold_every_module_that_lint_asks_docstrings_of():
    """The list of pyproject.toml and the reference must not drift apart."""
    ignores = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]["per-file-ignores"]
    (pattern,) = (key for key in ignores if key.startswith("!src/evenload/{"))
    asked = expand(pattern.removeprefix("!"))
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "src").rglob("*.py") if path.name != "__init__.py"}
    wanted = {file for file in files if any(fnmatch.fnmatchcase(file, one) for one in asked)}
    shown = {file_of(module).relative_to(ROOT).as_posix() for module in modules()}
    assert wanted - shown == set()


def expand(pattern):
    """Alternatives in braces, one level inside another."""
    begin = pattern.find("{")
    if begin < 0:
        return [pattern]
    depth, parts, last = 0, [], begin + 1
    for at in range(begin, len(pattern)):
        depth += {"{": 1, "}": -1}.get(pattern[at], 0)
        if (pattern[at] == "," and depth == 1) or depth == 0:
            parts.append(pattern[last:at])
            last = at + 1
        if depth == 0:
            return [one for part in parts for one in expand(pattern[:begin] + part + pattern[at + 1 :])]
    raise ValueError(pattern)


def test_what_the_package_exports_is_on_the_first_page():
    assert "evenload" in SITE["public_modules"]("python")
    assert set(evenload.__all__) == {
        "Callback",
        "Comparison",
        "PackedLoader",
        "TrainedRun",
        "__version__",
        "plan",
        "train",
    }
    homes = [getattr(evenload, name).__module__ for name in set(evenload.__all__) - {"__version__", "plan"}]
    assert {*homes, "evenload.cli.plan_call"} <= set(modules())


def test_links_hold_on_the_site():
    """Pages are written for readers of the repository; the site has their targets elsewhere."""
    moved = SITE["with_links"]
    text = "[a](../examples/plain_loop.py) ![b](pictures/x.png) [c](../README.md#d)\n```\n[e](../f)\n```\n"
    assert moved(text, "docs/loader.md", "loader.md") == (
        "[a](source/examples/plain_loop.py.md) ![b](pictures/x.png) [c](index.md#d)\n```\n[e](../f)\n```\n"
    )
    assert moved("[g](../training.md#h)", "docs/howto/lora.md", "howto/lora.md") == "[g](../training.md#h)"
    assert moved("[i](docs/guide.md)", "README.md", "index.md") == "[i](guide.md)"
    assert moved("[j](https://example.org/k)", "README.md", "index.md") == "[j](https://example.org/k)"


def test_every_file_that_a_page_links_to_has_a_page():
    paths = list(SITE["linked_outside"]())
    assert len(paths) == len(set(paths))
    assert "examples/plain_loop.py" in paths
    for path in paths:
        if not path.endswith(SITE["PICTURES"]):
            assert SITE["source_page"](path).startswith("# "), path
