"""Typed keyword arguments of `PackedLoader` are those that it takes."""

import inspect
from collections.abc import Sequence
from dataclasses import fields
from typing import get_type_hints

from evenload import PackedLoader
from evenload.data.config import DataConfig
from evenload.integrations.loader_options import LoaderOptions
from evenload.integrations.loader_settings import LoaderSettings

NAMED = set(inspect.signature(PackedLoader).parameters) - {"settings"}
OF_THE_DATA = {"sources", "mixture"}
"""Said by the first argument: a path, several, or a `DataConfig`."""


def test_every_option_is_named_once_with_its_type():
    """An option that was added, renamed or given another type, and not here."""
    expected = {name: hint for name, hint in get_type_hints(DataConfig).items() if name in DataConfig.__struct_fields__}
    options = get_type_hints(LoaderOptions)
    expected |= {field.name: options[field.name] for field in fields(LoaderOptions)}
    for name in NAMED | OF_THE_DATA:
        expected.pop(name, None)
    expected["include"] = expected["ignore_columns"] = Sequence[str]  # a list, too
    assert get_type_hints(LoaderSettings) == expected


def test_the_signature_names_what_else_it_takes():
    hint = inspect.signature(PackedLoader).parameters["settings"].annotation
    assert "LoaderSettings" in str(hint)
