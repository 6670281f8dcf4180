"""Configurations that the pages show are valid."""

import json
import re
import tomllib
from pathlib import Path

from evenload.config.train_config import load_train_config

ROOT = Path(__file__).resolve().parents[2]


def test_configurations_in_the_docs_are_valid(tmp_path):
    """An example with a misspelt or removed key is the first thing a new user meets."""
    for page in (ROOT / "README.md", ROOT / "docs" / "training.md"):
        examples = re.findall(r"```toml\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.S)
        assert examples, page.name
        # The first one stands alone; the others are parts of a configuration, tried on top of it.
        file = tmp_path / "config.toml"
        file.write_text(examples[0])
        load_train_config(file, [])
        for part in examples[1:]:
            load_train_config(file, list(overrides_of(tomllib.loads(part))))


def overrides_of(tree, prefix=""):
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from overrides_of(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}={json.dumps(value)}"
