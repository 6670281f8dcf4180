"""A source distribution, a wheel built from it, and the wheel tried in fresh environments without a compiler.

    python tools/make_wheel.py [--python PATH]...        `make wheel`; 1.5 minutes, half a minute a Python

Writes dist/. The wheel is installed by each interpreter named (default: the one that runs this) with a PATH that holds
nothing but the new environment, so whatever would have to be compiled fails. It is this machine's own (`linux_x86_64`):
those for the index come from .github/workflows/release.yml, which also tries them.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
TRIED = ROOT / "tools" / "try_wheel.py"
# Otherwise somebody else's release of today would decide whether this passes; pip's isolated builds read it too.
CONSTRAINED = {"PIP_CONSTRAINT": str(ROOT / "constraints.txt")}


def main() -> None:
    """Build, then try."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", action="append", metavar="PATH", help="an interpreter to try the wheel under")
    pythons = parser.parse_args().python or [sys.executable]
    shutil.rmtree(DIST, ignore_errors=True)
    building = os.environ | CONSTRAINED
    subprocess.run([sys.executable, "-m", "build", "--outdir", DIST], cwd=ROOT, env=building, check=True)
    (wheel,) = DIST.glob("*.whl")
    if "-cp311-abi3-" not in wheel.name:
        sys.exit(f"tools/make_wheel.py: {wheel.name} is not for every Python from 3.11 on")
    sys.stdout.write(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB\n")
    for python in pythons:
        try_under(python, wheel)


def try_under(python: str, wheel: Path) -> None:
    """Install the wheel into an environment of this interpreter and run the checks of tools/try_wheel.py in it."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([python, "-m", "venv", folder], check=True)
        programs = Path(folder) / "bin"
        environment = {key: value for key, value in os.environ.items() if key not in ("CC", "CXX", "PYTHONPATH")}
        environment |= CONSTRAINED | {"PATH": str(programs)}
        began = time.perf_counter()
        install = [programs / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wheel]
        subprocess.run(install, env=environment, check=True)
        seconds = time.perf_counter() - began
        size = sum(file.stat().st_size for file in (Path(folder) / "lib").rglob("*") if file.is_file())
        subprocess.run([programs / "python", TRIED], cwd=folder, env=environment, check=True)
        sys.stdout.write(f"installed without torch in {seconds:.0f} s, {size / 1e6:.0f} MB with pip\n")


if __name__ == "__main__":
    main()
