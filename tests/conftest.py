"""Fixtures shared by all tests."""

import os

import pytest
from hypothesis import HealthCheck, settings

# The same examples in every run, so that a red run is red again; `--hypothesis-profile=explore` looks further, through
# whole sweeps too (tests/support/sweeps.py). No limits of time in either: on a loaded machine they fail whatever the
# code does.
_ANY_MACHINE = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("repeatable", _ANY_MACHINE, derandomize=True)
settings.register_profile("explore", _ANY_MACHINE)
settings.load_profile("repeatable")

# One thread per process, set before torch is imported: the tests run many processes on few cores, and idle OpenMP
# threads spin instead of sleeping.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long tests begin first, shared out among the workers of a parallel run, so that none is the last.

    `--dist worksteal` gives each worker a run of consecutive tests and moves those at its end to idle ones.
    """
    workers = getattr(config, "workerinput", {}).get("workercount", 1)
    long = [item for item in items if item.get_closest_marker("long")]
    others = [item for item in items if not item.get_closest_marker("long")]
    size = -(-len(others) // workers)
    parts = [(*long[k::workers], *others[k * size : (k + 1) * size]) for k in range(workers)]
    items[:] = [item for part in parts for item in part]


@pytest.fixture(scope="session", autouse=True)
def float64_throughout():
    """Let float64 models compute without transformers' roundings to float32, which differ from processor to processor,
    in this process and in all ranks (`exact_ranks`)."""
    from evenload.check.smaller_run import exact_casts

    with exact_casts():
        yield


@pytest.fixture(autouse=True)
def _rounded_casts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take `float64_throughout` back in this process, for tests marked `rounded_casts(reason)`."""
    if (marker := request.node.get_closest_marker("rounded_casts")) is None:
        return
    (reason,) = marker.args
    assert reason, "say why this test needs transformers' roundings"
    from torch import nn

    monkeypatch.setattr(nn.Module, "__call__", nn.Module.__call__.__wrapped__)


@pytest.fixture(scope="session")
def gloo_pool():
    """Real gloo processes, started once for the whole test run."""
    from gloo_pool import GlooPool

    pool = GlooPool()
    yield pool
    pool.close()
