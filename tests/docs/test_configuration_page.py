"""docs/configuration.md, and the configuration that the README shows."""

import re
import runpy
from pathlib import Path

from evenload.runtime.config import load_train_config

ROOT = Path(__file__).resolve().parents[2]


def test_committed_page_is_the_generated_one():
    """A key without documentation, or documentation of a key that is gone; run docs/make_configuration.py."""
    script = runpy.run_path(str(ROOT / "docs" / "make_configuration.py"))
    assert script["TARGET"].read_text(encoding="utf-8") == script["configuration_page"]()


def test_configurations_in_the_docs_are_valid(tmp_path):
    """An example with a misspelt or removed key is the first thing a new user meets."""
    for page in (ROOT / "README.md", ROOT / "docs" / "training.md"):
        examples = re.findall(r"```toml\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.S)
        assert examples, page.name
        for example in examples:
            file = tmp_path / "config.toml"
            file.write_text(example)
            load_train_config(file, [])
