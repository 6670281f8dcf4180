"""`make wheels`: whatever a GPU machine without a network lacks, and a wheel of Evenload that is of these sources."""

import ast
import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import gpu_install
from gpu_install import core_digest, machine_has, names_of, needed, unlike_sources, wheels, with_needs
from gpu_parts import PARTS

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "evenload"
PROVIDED = packages_distributions()
NOT_ON_THE_MACHINE = {"liger-kernel", "msgspec", "nanobind-backend"}


def save_wheel(folder: Path, name: str, requires=(), files=()) -> Path:
    path = folder / f"{name.replace('-', '_')}-1.0-py3-none-any.whl"
    with ZipFile(path, "w") as archive:
        lines = [f"Name: {name}", "Version: 1.0", *(f"Requires-Dist: {one}" for one in requires)]
        archive.writestr(
            f"{name.replace('-', '_')}-1.0.dist-info/METADATA", "\n".join(["Metadata-Version: 2.1", *lines])
        )
        for file, content in files:
            archive.writestr(file, content)
    return path


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """wheels/, with the digest of our sources."""
    monkeypatch.setattr(gpu_install, "WHEELS", tmp_path)
    (tmp_path / "core.txt").write_text(core_digest())
    return tmp_path


def test_what_is_needed_is_on_the_machine_or_in_the_wheels(folder):
    """By pyproject.toml, read here another way: a dependency that is added is gathered, or is on the list."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = [
        *project["dependencies"],
        *project["optional-dependencies"]["train"],
        "pytest",
        "pytest-timeout",
        "hypothesis",
    ]
    gathered = with_needs(names_of(needed()), machine_has(), lambda name: save_wheel(folder, name))
    assert {canonicalize_name(Requirement(one).name) for one in listed} - machine_has() <= gathered
    assert gathered == NOT_ON_THE_MACHINE


def test_wheels_come_with_what_they_need(folder):
    """Needs of needs; not what the machine has, what is for other systems, or an extra."""
    asks = {"a": ["b>=2", "torch", "c; extra == 'all'"], "b": ["D_e", "f; sys_platform == 'win32'"], "d-e": ["a"]}
    fetched = []

    def fetch(name: str) -> Path:
        fetched.append(name)
        return save_wheel(folder, name, asks[name])

    assert with_needs({"a", "numpy"}, machine_has(), fetch) == {"a", "b", "d-e"}
    assert sorted(fetched) == ["a", "b", "d-e"]


def test_the_files_of_a_wheel_are_those_of_the_sources(folder):
    files = {path.relative_to(PACKAGE.parent): path.read_bytes() for path in PACKAGE.rglob("*") if path.is_file()}
    same = [(name, content) for name, content in files.items() if "__pycache__" not in name.parts]
    same.append((Path("evenload/_native.abi3.so"), b"compiled"))

    def differs(changed: list[tuple[Path, bytes]]) -> str | None:
        return unlike_sources(save_wheel(folder, "evenload", files=[(str(name), content) for name, content in changed]))

    assert differs(same) is None
    name, content = next(one for one in same if one[0].name == "errors.py")
    assert differs([one for one in same if one[0] != name]) == "evenload/errors.py"
    assert differs([*(one for one in same if one[0] != name), (name, content + b"\n")]) == "evenload/errors.py"
    assert differs([*same, (Path("evenload/gone.py"), b"")]) == "evenload/gone.py"
    (folder / "core.txt").write_text("of another core")
    assert differs(same) == "native"


@pytest.mark.parametrize("present", [[], ["evenload"]])
def test_an_installation_that_cannot_be_whole_is_refused(folder, monkeypatch, present):
    """Before anything is installed, with what is wrong and what to do."""
    monkeypatch.setattr(gpu_install, "SITE", folder / "site")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("installs"))
    monkeypatch.setattr(gpu_install, "needed", lambda: ["numpy", "not-there"])
    for name in present:
        save_wheel(folder, name)
    if present:
        save_wheel(folder, "not-there")
        expected = (
            r"evenload-1\.0-py3-none-any\.whl is not of these sources: evenload/__init__\.py differs; run `make wheels`"
        )
    else:
        expected = "lacks evenload, not-there, which this machine has not; run `make wheels`"
    with pytest.raises(SystemExit, match=expected):
        gpu_install.install()


COLLECT = """
import json, sys
import pytest

code = pytest.main({words})
files = [str(getattr(module, "__file__", "")) for module in list(sys.modules.values())]
print()
print(json.dumps([file for file in files if file.endswith(".py")]))
sys.exit(code)
"""


def imported_by(file: Path) -> set[str]:
    """Distributions that a file imports when it is imported itself."""
    names = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Import):
            names |= {one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add(node.module)
    return {canonicalize_name(one) for name in names for one in PROVIDED.get(name.partition(".")[0], ())[:1]}


def test_the_tests_of_a_gpu_import_nothing_else():
    """Whatever of ours is loaded to collect them, with the options of the parts, imports what is there or gathered."""
    assert imported_by(Path(__file__)) == {"packaging", "pytest"}
    kernels, training = ([w for w in part.words if "{" not in w] for part in PARTS if "pytest" in part.words)
    words = [*kernels[2:], *(word for word in training if word.startswith("tests/")), "--collect-only", "-q"]
    command = [sys.executable, "-c", COLLECT.format(words=words)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(word in done.stdout for word in words if word.startswith("tests/"))
    ours = (ROOT / "src", ROOT / "tests")
    files = [Path(name) for name in json.loads(done.stdout.splitlines()[-1])]
    own = [file for file in files if any(file.is_relative_to(folder) for folder in ours)]
    assert len(own) > 50
    allowed = machine_has() | NOT_ON_THE_MACHINE | {"evenload"}
    assert {file.name: needs for file in own if (needs := imported_by(file) - allowed)} == {}


@pytest.mark.skipif(not gpu_install.WHEELS.is_dir(), reason="no wheels/ here: make wheels")
def test_pip_takes_the_gathered_wheels_on_the_machine(tmp_path):
    names = sorted(wheels())
    assert {*NOT_ON_THE_MACHINE, "evenload"} <= {*names}
    platforms = [f"--platform={one}_x86_64" for one in ("linux", "manylinux_2_28", "manylinux_2_24", "manylinux_2_17")]
    words = ("--dry-run", "--no-index", "--no-deps", "--only-binary=:all:", "--python-version=3.12", *platforms)
    command = [sys.executable, "-m", "pip", "install", *words, "--target", tmp_path, "--find-links", gpu_install.WHEELS]
    done = subprocess.run([*command, *names], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    taken = re.search("Would install (.*)", done.stdout)[1]
    assert {canonicalize_name(one.rpartition("-")[0]) for one in taken.split()} == {*names}


@pytest.mark.skipif(not gpu_install.WHEELS.is_dir(), reason="no wheels/ here: make wheels")
def test_the_core_runs_on_older_systems_than_this_one():
    """glibc of 2012, the C++ library of GCC 11 (Ubuntu 22.04)."""
    with ZipFile(wheels()["evenload"]) as archive:
        core = archive.read("evenload/_native.abi3.so")
    for symbols, newest in ((rb"GLIBC_2\.(\d+)", 17), (rb"GLIBCXX_3\.4\.(\d+)", 29)):
        assert max(map(int, re.findall(symbols, core))) <= newest
