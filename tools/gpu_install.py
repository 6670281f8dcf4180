"""What a GPU machine lacks for `make gpu`: gathered here, installed there beside the torch that it has.

    python tools/gpu_install.py            there
    python tools/gpu_install.py --gather   `make wheels`, on a machine with a network: wheels/, which goes along

Of what Evenload, training and the tests of GPUs need, only what is missing is installed, without regard to versions: a
torch that knows a machine's driver is worth more than the one we name. Where there is wheels/, nothing else is asked,
nothing compiles, and all goes to build/gpu_site, which `make gpu` puts before the machine's own packages. Else pip's
index is asked, and Evenload is built in place by scikit-build-core and nanobind, which must be there.

wheels/ is for Python 3.12 on Linux: Evenload's own wheel, and of the rest and its needs what tests/gpu/machine.txt does
not name. A wheel of Evenload that is not of the sources beside it is refused.
"""

import hashlib
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Collection, Iterable
from importlib.metadata import distributions
from pathlib import Path
from zipfile import ZipFile

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

ROOT = Path(__file__).resolve().parent.parent
WHEELS, SITE = ROOT / "wheels", ROOT / "build" / "gpu_site"
TESTS_NEED = ("pytest", "pytest-timeout", "hypothesis")
KERNELS = "liger-kernel"  # used where it is
_PLATFORMS = ("_2_28", "_2_27", "_2_24", "_2_17", "2014")
_TARGET = {"python_version": "3.12", "python_full_version": "3.12.3", "sys_platform": "linux", "extra": ""}
_PIP = (sys.executable, "-m", "pip")


def needed() -> list[str]:
    """Requirements of Evenload, of training, and of what tests and benchmarks of a GPU import."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [*project["dependencies"], *project["optional-dependencies"]["train"], *TESTS_NEED, KERNELS]


def names_of(requirements: Iterable[str]) -> set[str]:
    """Names of the distributions that these ask for on the machines that wheels/ is for."""
    asked = (Requirement(text) for text in requirements)
    return {canonicalize_name(one.name) for one in asked if one.marker is None or one.marker.evaluate(_TARGET)}


def machine_has() -> set[str]:
    """Names of the distributions of tests/gpu/machine.txt."""
    lines = (ROOT / "tests" / "gpu" / "machine.txt").read_text().splitlines()
    return {canonicalize_name(line) for line in lines if line and not line.startswith("#")}


def with_needs(names: Collection[str], has: Collection[str], fetch: Callable[[str], Path]) -> set[str]:
    """Those names and all that their wheels ask for, without what the machine has; `fetch` brings a wheel."""
    found: set[str] = set()
    waiting = set(names) - set(has)
    while waiting:
        name = waiting.pop()
        found.add(name)
        (held,) = distributions(path=[str(fetch(name))])
        waiting |= names_of(held.requires or ()) - found - set(has)
    return found


def gather() -> None:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from harness import commit_name

    shutil.rmtree(WHEELS, ignore_errors=True)
    platforms = [word for one in _PLATFORMS for word in ("--platform", f"manylinux{one}_x86_64")]
    target = ["--python-version", "3.12", *platforms, "--only-binary", ":all:", "--no-deps", "--quiet"]

    def fetch(name: str) -> Path:
        subprocess.run([*_PIP, "download", "-c", ROOT / "constraints.txt", *target, "-d", WHEELS, name], check=True)
        return wheels()[name]

    with_needs(names_of(needed()), machine_has(), fetch)
    subprocess.run([*_PIP, "wheel", "--quiet", "--no-deps", "-w", WHEELS, ROOT], check=True)
    (WHEELS / "core.txt").write_text(core_digest() + "\n")
    (WHEELS / "commit.txt").write_text(commit_name() + "\n")
    sys.stdout.writelines(f"{path.name}: {path.stat().st_size / 1e6:.1f} MB\n" for path in wheels().values())


def wheels() -> dict[str, Path]:
    """The files of wheels/ by name of the distribution."""
    return {parse_wheel_filename(path.name)[0]: path for path in WHEELS.glob("*.whl")}


def core_digest() -> str:
    """Of the sources that are compiled."""
    files = sorted([*(ROOT / "native").iterdir(), ROOT / "CMakeLists.txt"])
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()


def unlike_sources(wheel: Path) -> str | None:
    """A file that the wheel does not hold as the sources have it; None where there is none."""
    package = ROOT / "src" / "evenload"
    files = (path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    here = {path.relative_to(package.parent).as_posix(): path.read_bytes() for path in files}
    with ZipFile(wheel) as archive:
        names = (name for name in archive.namelist() if name.startswith("evenload/") and not name.endswith(".so"))
        held = {name: archive.read(name) for name in names}
    if (WHEELS / "core.txt").read_text().strip() != core_digest():
        return "native"
    return next((name for name in sorted(here | held) if here.get(name) != held.get(name)), None)


def install() -> None:
    """Exit with pip's code where it fails, and with what is missing or old."""
    shutil.rmtree(SITE, ignore_errors=True)
    has = {canonicalize_name(one.name) for one in distributions()}
    missing = sorted(names_of(needed()) - has)
    if not WHEELS.is_dir():
        commands = [["--no-deps", "--no-build-isolation", "--editable", ROOT]]
        commands = [missing, *commands] if missing else commands
    else:
        found = wheels()
        if absent := [name for name in ("evenload", *missing) if name not in found]:
            sys.exit(f"wheels/ lacks {', '.join(absent)}, which this machine has not; {_AGAIN}")
        if differs := unlike_sources(found["evenload"]):
            sys.exit(f"wheels/{found['evenload'].name} is not of these sources: {differs} differs; {_AGAIN}")
        chosen = [path for name, path in found.items() if name == "evenload" or name not in has]
        commands = [["--no-index", "--no-deps", "--no-compile", "--target", SITE, *chosen]]
    for words in commands:
        if code := subprocess.run([*_PIP, "install", "--disable-pip-version-check", *words], check=False).returncode:
            sys.exit(code)


_AGAIN = "run `make wheels` on a machine with a network, and take the folder along"

if __name__ == "__main__":
    gather() if sys.argv[1:] == ["--gather"] else install()
