"""What is installed and released: versions, the module as a command, links of the index page, the workflow's steps.

Wheels themselves are built and tried by `make wheel`, which compiles for a minute.
"""

import re
import runpy
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

import evenload

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
HOME = "https://example.org/someone/evenload"


@pytest.fixture(scope="module")
def metadata():
    return runpy.run_path(str(ROOT / "tools" / "release_metadata.py"))


def test_the_module_is_the_command():
    done = subprocess.run([sys.executable, "-m", "evenload", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"evenload {evenload.__version__}\n"
    assert evenload.__version__ == version("evenload") == PROJECT["project"]["version"], (
        "install again: pip install -e ."
    )


def test_the_wheel_is_asked_for_the_stable_abi_in_one_place_and_the_core_uses_it():
    """`wheel.py-api` alone names the wheel; the core must then be built for that ABI, which took no effect once."""
    assert PROJECT["tool"]["scikit-build"]["wheel"]["py-api"] == "cp311"
    cmake = (ROOT / "CMakeLists.txt").read_text()
    assert "if(SKBUILD_SABI_VERSION)\n  set(bindings BACKEND_MODULE nanobind_backend)" in cmake
    assert "nanobind_add_module(_native ${bindings}" in cmake
    (backend,) = (one for one in PROJECT["project"]["dependencies"] if one.startswith("nanobind-backend"))
    assert "<" not in backend
    assert "==" not in backend


def test_the_index_page_has_no_relative_link(metadata):
    page = metadata["with_absolute_links"]((ROOT / "README.md").read_text(), HOME, "v1.2.3")
    targets = [result["target"] for result in metadata["_LINK"].finditer(re.sub(r"```.*?```", "", page, flags=re.S))]
    assert targets
    assert all(re.match(r"https?:|#", target) for target in targets)


def test_what_the_workflow_and_the_container_name_is_there():
    workflow = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
    assert workflow["jobs"]["publish"]["needs"] == "wheels"
    assert workflow["jobs"]["publish"]["permissions"] == {"id-token": "write"}
    steps = [step.get("run", "") for job in workflow["jobs"].values() for step in job["steps"]]
    scripts = re.findall(r"tools/\w+\.py", " ".join([*steps, PROJECT["tool"]["cibuildwheel"]["test-command"]]))
    assert sorted(set(scripts)) == ["tools/release_metadata.py", "tools/try_wheel.py"]
    assert all((ROOT / script).is_file() for script in scripts)
    # The wheel jobs hold the unpacked source distribution alone, in a folder of its own.
    (build,) = (one for one in workflow["jobs"]["wheels"]["steps"] if "cibuildwheel" in one.get("uses", ""))
    assert build["with"]["package-dir"] == "source"
    assert PROJECT["tool"]["cibuildwheel"]["test-command"] == "python {package}/tools/try_wheel.py"
    assert not {"tools", "tools/try_wheel.py"} & set(PROJECT["tool"]["scikit-build"]["sdist"]["exclude"])
    container = (ROOT / "Containerfile").read_text()
    (extras,) = re.findall(r"evenload-\*\.whl\)\[([\w,]+)\]", container)
    assert set(extras.split(",")) <= set(PROJECT["project"]["optional-dependencies"])
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert not {"native", "src", "CMakeLists.txt", "pyproject.toml", "README.md", "LICENSE"} & set(ignored)


def test_the_oldest_and_the_newest_pytorch_are_tested():
    (range_of,) = (one for one in PROJECT["project"]["optional-dependencies"]["train"] if one.startswith("torch"))
    oldest, beyond = (
        tuple(map(int, edge.split("."))) for edge in re.fullmatch(r"torch>=([\d.]+),<([\d.]+)", range_of).groups()
    )
    tested = re.search(r"^TORCHES := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split()
    minors = [tuple(map(int, one.split(".")[:2])) for one in tested]
    assert minors == [oldest, (beyond[0], beyond[1] - 1)]
    assert "make test-torches" in (ROOT / ".ci" / "run").read_text()
