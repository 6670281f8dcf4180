"""The site builds without a dead link, and every public name of the Python API is on its pages, with a docstring."""

import ast
import re
import runpy
import subprocess
import sys
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


def test_what_the_package_exports_is_on_the_first_page():
    assert "evenload" in SITE["public_modules"]("python")
    assert set(evenload.__all__) == {
        "Callback",
        "Comparison",
        "Cost",
        "Isolation",
        "MicroBatches",
        "PackedLoader",
        "PackedSFTTrainer",
        "PackedTrainer",
        "TrainedRun",
        "TreeBatch",
        "TreePacker",
        "__version__",
        "check_isolation",
        "micro_batches",
        "plan",
        "train",
        "tree_attention",
    }
    homes = [getattr(evenload, name).__module__ for name in set(evenload.__all__) - {"__version__", "plan"}]
    assert {*homes, "evenload.cli.plan"} <= set(modules())
