"""The layout in which fewer ranks go on."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenload.config.layouts import shrunk_parallel
from evenload.config.train_config import ParallelConfig
from evenload.errors import ConfigError


@pytest.mark.parametrize(
    ("before", "ranks", "pp", "dp"),
    [
        ({"dp": 4}, 3, 1, 3),
        ({"pp": 4}, 3, 3, 1),
        ({"pp": 2, "dp": 2}, 3, 3, 1),  # as near as one stage with three replicas, and a rank holds less
        ({"pp": 2, "dp": 4}, 6, 2, 3),
        ({"pp": 2, "dp": 2}, 1, 1, 1),
    ],
)
def test_by_hand(before, ranks, pp, dp):
    found = shrunk_parallel(ParallelConfig(**before), 8, ranks)
    assert (found.pp, found.dp) == (pp, dp)


@given(
    pp=st.integers(1, 4),
    dp=st.integers(1, 4),
    cp=st.sampled_from([1, 2]),
    lost=st.integers(0, 12),
    layers=st.integers(4, 9),
)
def test_it_fits_uses_most_ranks_and_keeps_what_is_shared(pp, dp, cp, lost, layers):
    before = ParallelConfig(pp=pp, dp=dp, cp=cp)
    ranks = max(1, pp * dp * cp - lost)
    if ranks < cp:
        with pytest.raises(ConfigError, match=r"1 rank left, but parallel\.cp x parallel\.tp is 2"):
            shrunk_parallel(before, layers, ranks)
        return
    found = shrunk_parallel(before, layers, ranks)
    assert found.cp == cp
    assert found.pp <= layers
    used = found.pp * found.dp * cp
    assert used <= ranks
    best = max((ranks // cp) // stages * stages for stages in range(1, layers + 1)) * cp
    assert used == best if lost else found == before
