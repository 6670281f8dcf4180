"""What trains says what to install where PyTorch or transformers is missing; what plans works without them."""

import subprocess
import sys

# The finder says what Python says of a package that is not installed.
BLOCK = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocked())
"""
COMMANDS = """
from evenload.cli.main import main
for command in ("train", "check"):
    try:
        main([command, "config.toml"])
    except SystemExit as stopped:
        assert stopped.code == 2, stopped.code
try:
    from evenload import PackedLoader
except ImportError as error:
    print(f"loader: {error}", file=sys.stderr)
try:
    from evenload import PackedTrainer
except ImportError as error:
    print(f"trainer: {error}", file=sys.stderr)
import evenload
try:
    evenload.train("config.toml")
except ImportError as error:
    print(error, file=sys.stderr)
"""
WHAT = ("evenload train", "evenload check", "evenload.PackedLoader", "evenload.PackedTrainer", "evenload.train")
"""Needs them, in this order."""


def test_what_to_install_is_one_line() -> None:
    code = BLOCK.format(blocked=("torch", "transformers", "safetensors")) + COMMANDS
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == len(WHAT), done.stderr
    for line, what in zip(lines, WHAT, strict=True):
        assert f"{what} needs PyTorch and transformers" in line
        assert "No module named 'torch'" in line
        assert "pip install 'evenload[train]'" in line
