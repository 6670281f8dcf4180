"""Every rank of these tests comes from the tests' own server, so that it computes under `exact_casts`."""

import pytest

from rank_server import rank_context


@pytest.fixture(scope="session", autouse=True)
def _server_of_the_tests():
    """Start it before a launcher of ours would start one without the tests' modules."""
    rank_context()
