"""`apply_override`: `section.key=value` of a command line, set in the tree of a configuration file."""

import tomllib
from typing import Any

from evenload.errors import ConfigError
from evenload.runtime.config.config_keys import OTHER_NAMES


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Set one value in place; the text is read as TOML, and as a string where it is no TOML.

    Raises:
        ConfigError: not of that form, or a section that is a value.
    """
    name, equals, text = override.partition("=")
    *sections, key = name.strip().split(".")
    if not equals or not sections or not key:
        meant = OTHER_NAMES.get(name.strip())
        example = f"{meant}={text}" if equals and meant else "train.steps=20"
        raise ConfigError(f"override '{override}' is not of the form section.key=value, such as {example}")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text  # so that quotes need no shell escaping
    node = tree
    for section in sections:
        node = node.setdefault(section, {})
        if not isinstance(node, dict):
            raise ConfigError(f"override '{override}': '{section}' is a value, not a section")
    node[key] = value
