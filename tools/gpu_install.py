"""Installs Evenload beside the torch that a GPU machine has, for `make gpu`.

    python tools/gpu_install.py

The package itself is built in place by scikit-build-core and nanobind, which must be there. Of what it and its tests
need, only what is missing is installed, without regard to versions: a torch that knows this machine's driver is worth
more than the one we name. Where `wheels/` exists (`make wheels`, on a machine with a network), nothing else is asked.
"""

import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
TESTS_NEED = ("pytest", "pytest-timeout", "hypothesis")


def missing() -> list[str]:
    """Names of distributions that are needed and not installed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = [*project["dependencies"], *project["optional-dependencies"]["train"], *TESTS_NEED]
    result = []
    for text in listed:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue
        try:
            version(requirement.name)
        except PackageNotFoundError:
            if requirement.name != project["name"]:
                result.append(requirement.name)
    return sorted(set(result))


def main() -> None:
    """Exit code of pip."""
    wheels = ROOT / "wheels"
    offline = ["--no-index", "--find-links", str(wheels)] if wheels.is_dir() else []
    pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check"]
    commands = [[*pip, "--no-deps", "--no-build-isolation", "--editable", str(ROOT)]]
    if names := missing():
        commands.insert(0, [*pip, *offline, *names])
    for command in commands:
        if code := subprocess.run(command, check=False).returncode:
            sys.exit(code)


if __name__ == "__main__":
    main()
