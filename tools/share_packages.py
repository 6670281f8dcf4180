"""An environment that sees this one's packages behind its own: for engines whose requirements contradict `dev`'s.

python tools/share_packages.py .venv/torchtitan       # what this interpreter has, that one finds
python tools/share_packages.py --extra torchtitan     # requirements of an extra, without Evenload itself
"""

import argparse
import sys
import sysconfig
import tomllib
from pathlib import Path

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("environment", nargs="?", type=Path)
parser.add_argument("--extra")
options = parser.parse_args()

if options.environment:
    (packages,) = options.environment.glob("lib/python*/site-packages")
    # As a site directory, so that its `.pth` files count, by one of which Evenload is found.
    (packages / "shared.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
if options.extra:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    named = project["optional-dependencies"][options.extra]
    sys.stdout.write(" ".join(one for one in named if not one.startswith("evenload")))
