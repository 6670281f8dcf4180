"""Tests of what only a GPU shows."""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What CUDA's and Triton's packages warn of on a machine that nobody here has seen is told, and fails no test."""
    for item in items:
        if item.path.is_relative_to(__file__.rpartition("/")[0]):
            item.add_marker(pytest.mark.filterwarnings("default"))
