"""Layouts that a run may take, as they are written, and what is refused."""

import msgspec
import pytest

from evenload.config.layouts import layouts_of
from evenload.config.train_config import TrainConfig, load_train_config
from evenload.errors import ConfigError
from evenload.types.layout import even_layout, split_layout
from small_run import write_small_run

NUM_LAYERS = 8


def config_of(tmp_path, *overrides: str) -> TrainConfig:
    tmp_path.mkdir(exist_ok=True)
    file = write_small_run(tmp_path, [], "max_document_tokens = 8\nbatch_documents = 1\n[train]\nsteps = 1")
    return load_train_config(file, list(overrides))


def test_the_run_starts_in_its_own_layout_and_others_follow_each_once(tmp_path) -> None:
    config = config_of(
        tmp_path,
        "parallel.pp=4",
        'plan.layouts=["pp=4", "pp=2,dp=2", "dp=4", "pp=3,layers=3+3+2", "pp=2,virtual=2", "dp=1,pp=2,layers=5+3"]',
    )
    assert layouts_of(config, NUM_LAYERS) == (
        even_layout(NUM_LAYERS, pp=4),
        even_layout(NUM_LAYERS, pp=2, dp=2),
        even_layout(NUM_LAYERS, dp=4),
        split_layout([3, 3, 2], pp=3),
        even_layout(NUM_LAYERS, pp=2, dp=2, virtual=2),
        split_layout([5, 3], pp=2),
    )


def test_groups_of_context_and_tensor_ranks_stay(tmp_path) -> None:
    config = config_of(tmp_path, "parallel.pp=2", "parallel.tp=2", 'plan.layouts=["dp=2", "dp=2,tp=2,cp=1"]')
    with pytest.raises(ConfigError, match="'dp=2,tp=2,cp=1' is the same layout as an entry before it"):
        layouts_of(config, NUM_LAYERS)
    config = config_of(tmp_path / "again", "parallel.pp=2", "parallel.tp=2", 'plan.layouts=["dp=2"]')
    assert layouts_of(config, NUM_LAYERS)[1] == even_layout(NUM_LAYERS, dp=2, tp=2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pp=2,cp=2", r"'pp=2,cp=2' has cp=2, \[parallel\] has cp=1; only dp, pp, virtual"),
        ("pp=4,dp=2", r"needs 8 processes, \[parallel\] \(pp=4\) starts 4; a run starts in its largest layout"),
        ("pp=3,layers=3+3", "gives 6 layers to 2 stages, the layout has 3 stages and the model 8 layers"),
        ("pp=3,layers=3+3+3", "gives 9 layers to 3 stages"),
        ("pp=3,layers=3+3+", "'layers=3[+]3[+]' is not one of dp cp pp tp virtual"),
        ("pp=9", "8 layers cannot fill 9 stages"),
        ("pp=3,devices=1+1+3", r"needs 5 processes, \[parallel\] \(pp=4\) starts 4"),
        ("pp=2,dp=2,devices=1+2", "stages with different numbers of devices are of one pipeline"),
        ("stages=3", "'stages=3' is not one of"),
        ("pp=2,pp=4", "pp is given twice"),
        ("", "'' is not one of"),
    ],
)
def test_what_no_run_can_take_is_refused_in_words(tmp_path, text, message) -> None:
    with pytest.raises(ConfigError, match=message):
        layouts_of(config_of(tmp_path, "parallel.pp=4", f'plan.layouts=["{text}"]'), NUM_LAYERS)


def test_flexpipe_without_declared_layouts_takes_depths_of_the_same_processes(tmp_path) -> None:
    flex = ("parallel.pp=4", "plan.strategy=flexpipe")
    found = layouts_of(config_of(tmp_path, *flex), NUM_LAYERS)
    assert [one.describe() for one in found] == ["pp=4", "dp=2 pp=2", "dp=4", "pp=3"]
    fewer = config_of(tmp_path / "fewer", *flex, "plan.options.flexpipe={most_layouts=2}")
    assert layouts_of(fewer, NUM_LAYERS) == found[:2]
    declared = config_of(tmp_path / "declared", *flex, 'plan.layouts=["dp=4"]')
    assert layouts_of(declared, NUM_LAYERS) == (found[0], found[2])
    staying = config_of(tmp_path / "staying", "parallel.pp=4", "plan.strategy=auto")
    assert layouts_of(staying, NUM_LAYERS) == found[:1]
    with pytest.raises(ConfigError, match=r"flexpipe.most_layouts is 1, must be at least 2"):
        config_of(tmp_path / "none", *flex, "plan.options.flexpipe={most_layouts=1}")


def test_generations_differ_and_arrangements_do_not() -> None:
    first = even_layout(NUM_LAYERS, pp=2)
    later = msgspec.structs.replace(first, generation=3)
    assert first != later
    assert first.arrangement == later.arrangement == first
    assert even_layout(NUM_LAYERS, pp=2, dp=2).arrangement != first


def test_stages_with_different_numbers_of_devices_may_be_declared_and_started_in(tmp_path) -> None:
    wide = even_layout(NUM_LAYERS, pp=3, devices=[1, 2, 1])
    config = config_of(tmp_path, "parallel.pp=4", 'plan.layouts=["pp=3,devices=1+2+1", "pp=2,devices=1+2"]')
    assert layouts_of(config, NUM_LAYERS)[1:] == (wide, even_layout(NUM_LAYERS, pp=2, devices=[1, 2]))
    config = config_of(tmp_path / "start", "parallel.pp=3", "parallel.stage_devices=[1,2,1]", 'plan.layouts=["pp=4"]')
    assert layouts_of(config, NUM_LAYERS) == (wide, even_layout(NUM_LAYERS, pp=4))
    config = config_of(
        tmp_path / "layers", "parallel.pp=3", "parallel.stage_devices=[1,2,1]", "parallel.stage_layers=[3,4,1]"
    )
    assert layouts_of(config, NUM_LAYERS) == (split_layout([3, 4, 1], pp=3, devices=[1, 2, 1]),)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ('parallel.channels="fifo"', "fifo.* gives every pair of ranks one queue; that is not tested"),
        ("parallel.tp=2", "different numbers of devices are of one pipeline, without context and tensor"),
        ("parallel.dp=2", "dp=2 .* are of one pipeline"),
        ("parallel.virtual=2", "must be 3 numbers|of one pipeline"),
    ],
)
def test_what_no_test_runs_with_them_is_refused(tmp_path, setting, message) -> None:
    config = config_of(tmp_path, "parallel.pp=3", "parallel.stage_devices=[1,2,1]", setting)
    with pytest.raises(ConfigError, match=message):
        layouts_of(config, NUM_LAYERS)
