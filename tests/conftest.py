"""Fixtures shared by all tests."""

import pytest


@pytest.fixture(scope="session")
def gloo_pool():
    """Real gloo processes, started once for the whole test run."""
    from gloo_pool import GlooPool

    pool = GlooPool()
    yield pool
    pool.close()
