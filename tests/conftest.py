"""Fixtures shared by all tests."""

import os

import pytest
from hypothesis import HealthCheck, settings

# The same examples in every run, so that a red run is red again; `--hypothesis-profile=explore` looks further. No
# limits of time in either: on a loaded machine they fail whatever the code does.
_ANY_MACHINE = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("repeatable", _ANY_MACHINE, derandomize=True)
settings.register_profile("explore", _ANY_MACHINE)
settings.load_profile("repeatable")

# One thread per process, set before torch is imported: the tests run many processes on few cores, and idle OpenMP
# threads spin instead of sleeping.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def gloo_pool():
    """Real gloo processes, started once for the whole test run."""
    from gloo_pool import GlooPool

    pool = GlooPool()
    yield pool
    pool.close()
