"""The settings with which fewer ranks go on."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenload.config.planner import fitted_config, layouts_of, shrunk_parallel
from evenload.config.sections import RunConfig
from evenload.config.train_config import ModelConfig, ParallelConfig, PlanConfig, TrainConfig
from evenload.data.config import DataConfig
from evenload.errors import ConfigError

NUM_LAYERS = 8


def config_of(layouts: tuple[str, ...] = (), **parallel) -> TrainConfig:
    return TrainConfig(
        model=ModelConfig(path="model"),
        data=DataConfig(sources=("corpus",), max_document_tokens=8, batch_documents=1),
        parallel=ParallelConfig(**parallel),
        plan=PlanConfig(strategy="auto", layouts=layouts),
        train=RunConfig(output_dir="run", steps=1, cost_file="cost.json"),
    )


def described(config: TrainConfig) -> list[str]:
    return [layout.describe() for layout in layouts_of(config, NUM_LAYERS)]


@pytest.mark.parametrize(
    ("ranks", "start", "others"), [(3, "pp=3", ["pp=2", "pp=3 layers=2+3+3"]), (2, "pp=2", []), (1, "single", [])]
)
def test_named_layouts_that_still_fit_stay_once_each(ranks, start, others):
    config = config_of(("pp=4", "pp=2", "pp=3,layers=2+3+3", "pp=2,dp=1"), pp=2, dp=2)
    fitted = fitted_config(config, NUM_LAYERS, ranks)
    assert described(fitted) == [start, *others]
    assert fitted.train.cost_file is None, "measured in another layout"


def test_replicas_that_are_not_named_are_as_many_as_are_left():
    config = config_of(("pp=2", "dp=4"), pp=4)
    assert described(fitted_config(config, NUM_LAYERS, 3)) == ["pp=3", "pp=2"], "dp=4 needs four"
    config = config_of(("pp=1", "pp=2"), pp=4)
    assert described(fitted_config(config, NUM_LAYERS, 3)) == ["pp=3", "dp=3", "pp=2"]


def test_stages_with_different_numbers_of_ranks():
    """What is left of one cannot hold it; stages of the other one have as many each."""
    parallel = {"pp": 3, "stage_devices": (1, 2, 1)}
    assert described(fitted_config(config_of(**parallel), NUM_LAYERS, 3)) == ["pp=3"]
    assert described(fitted_config(config_of(**parallel), NUM_LAYERS, 2)) == ["pp=2"]
    assert described(fitted_config(config_of(("pp=2",), **parallel), NUM_LAYERS, 2)) == ["pp=2"]


def test_what_shares_matrices_or_documents_is_not_divided():
    with pytest.raises(ConfigError, match=r"1 rank left, but parallel\.cp x parallel\.tp is 2"):
        fitted_config(config_of(tp=2, dp=2), NUM_LAYERS, 1)


def test_layouts_in_which_no_run_starts_are_passed_over():
    """skrull has no pipeline."""
    config = config_of(pp=2, dp=2)
    skrull = msgspec.structs.replace(config, plan=msgspec.structs.replace(config.plan, strategy="skrull"))
    assert described(fitted_config(config, NUM_LAYERS, 3)) == ["pp=3"]
    assert described(fitted_config(skrull, NUM_LAYERS, 3)) == ["dp=3"]


@given(
    texts=st.lists(st.sampled_from(["pp=1", "pp=2", "pp=3", "pp=4", "dp=2", "pp=2,dp=2", "pp=5,dp=1"]), unique=True),
    ranks=st.integers(1, 7),
)
def test_it_always_fits_and_is_the_same_when_it_is_asked_again(texts, ranks):
    config = config_of(tuple(texts), pp=4, dp=2)
    fitted = fitted_config(config, NUM_LAYERS, ranks)
    layouts = layouts_of(fitted, NUM_LAYERS)
    assert max(layout.world_size for layout in layouts) == layouts[0].world_size <= ranks
    assert fitted_config(fitted, NUM_LAYERS, layouts[0].world_size) is fitted


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
def test_without_names_the_layout_is_as_by_hand(before, ranks, pp, dp):
    result = shrunk_parallel(ParallelConfig(**before), 8, ranks)
    assert (result.pp, result.dp) == (pp, dp)


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
    result = shrunk_parallel(before, layers, ranks)
    assert result.cp == cp
    assert result.pp <= layers
    used = result.pp * result.dp * cp
    assert used <= ranks
    best = max((ranks // cp) // stages * stages for stages in range(1, layers + 1)) * cp
    assert used == best if lost else result == before
