"""Layouts that a run may take, as they are written, and what is refused."""

import msgspec
import pytest

from evenload.config.planner import layouts_of
from evenload.config.train_config import read_train_config
from evenload.errors import ConfigError
from evenload.types.layout import ParallelLayout, even_layout, split_layout

NUM_LAYERS = 8


def layouts_with(*overrides: str) -> tuple[ParallelLayout, ...]:
    data = {"sources": ["corpus"], "max_document_tokens": 8, "batch_documents": 1}
    tree = {"model": {"path": "model"}, "data": data, "train": {"output_dir": "run", "steps": 1}}
    return layouts_of(read_train_config(tree, overrides), NUM_LAYERS)


def test_the_run_starts_in_its_own_layout_and_others_follow_each_once() -> None:
    others = '["pp=4", "pp=2,dp=2", "dp=4", "pp=3,layers=3+3+2", "pp=2,virtual=2", "dp=1,pp=2,layers=5+3"]'
    assert layouts_with("parallel.pp=4", f"plan.layouts={others}") == (
        even_layout(NUM_LAYERS, pp=4),
        even_layout(NUM_LAYERS, pp=2, dp=2),
        even_layout(NUM_LAYERS, dp=4),
        split_layout([3, 3, 2], pp=3),
        even_layout(NUM_LAYERS, pp=2, dp=2, virtual=2),
        split_layout([5, 3], pp=2),
    )


def test_groups_of_context_and_tensor_ranks_stay() -> None:
    shared = ("parallel.pp=2", "parallel.tp=2")
    with pytest.raises(ConfigError, match="'dp=2,tp=2,cp=1' is the same layout as an entry before it"):
        layouts_with(*shared, 'plan.layouts=["dp=2", "dp=2,tp=2,cp=1"]')
    assert layouts_with(*shared, 'plan.layouts=["dp=2"]')[1] == even_layout(NUM_LAYERS, dp=2, tp=2)


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
def test_what_no_run_can_take_is_refused_in_words(text, message) -> None:
    with pytest.raises(ConfigError, match=message):
        layouts_with("parallel.pp=4", f'plan.layouts=["{text}"]')


def test_flexpipe_without_declared_layouts_takes_depths_of_the_same_processes() -> None:
    flex = ("parallel.pp=4", "plan.strategy=flexpipe")
    result = layouts_with(*flex)
    described = ["pp=4", "dp=2 pp=2", "dp=4", "pp=3 devices=1+1+2", "pp=3 devices=2+1+1"]
    assert [one.describe() for one in result] == described
    # Of one queue for every pair of ranks nothing is tested with them.
    for idle in (
        'parallel.channels="fifo"',
        "plan.options.schedule=gpipe",
        "plan.options.flexpipe={part_pipelines=false}",
    ):
        assert [one.describe() for one in layouts_with(*flex, idle)] == [*described[:3], "pp=3"]
    assert layouts_with(*flex, "plan.options.flexpipe={most_layouts=2}") == result[:2]
    assert layouts_with(*flex, 'plan.layouts=["dp=4"]') == (result[0], result[2])
    assert layouts_with("parallel.pp=4", "plan.strategy=auto") == result[:1]
    with pytest.raises(ConfigError, match=r"flexpipe.most_layouts is 1, must be at least 2"):
        layouts_with(*flex, "plan.options.flexpipe={most_layouts=1}")


def test_generations_differ_and_arrangements_do_not() -> None:
    first = even_layout(NUM_LAYERS, pp=2)
    later = msgspec.structs.replace(first, generation=3)
    assert first != later
    assert first.arrangement == later.arrangement == first
    assert even_layout(NUM_LAYERS, pp=2, dp=2).arrangement != first


def test_stages_with_different_numbers_of_devices_may_be_declared_and_started_in() -> None:
    wide = even_layout(NUM_LAYERS, pp=3, devices=[1, 2, 1])
    result = layouts_with("parallel.pp=4", 'plan.layouts=["pp=3,devices=1+2+1", "pp=2,devices=1+2"]')
    assert result[1:] == (wide, even_layout(NUM_LAYERS, pp=2, devices=[1, 2]))
    start = ("parallel.pp=3", "parallel.stage_devices=[1,2,1]")
    assert layouts_with(*start, 'plan.layouts=["pp=4"]') == (wide, even_layout(NUM_LAYERS, pp=4))
    uneven = split_layout([3, 4, 1], pp=3, devices=[1, 2, 1])
    assert layouts_with(*start, "parallel.stage_layers=[3,4,1]") == (uneven,)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ('parallel.channels="fifo"', "fifo.* gives every pair of ranks one queue; that is not tested"),
        ("parallel.tp=2", "different numbers of devices are of one pipeline, without context and tensor"),
        ("parallel.dp=2", "dp=2 .* are of one pipeline"),
        ("parallel.virtual=2", "must be 3 numbers|of one pipeline"),
    ],
)
def test_what_no_test_runs_with_them_is_refused(setting, message) -> None:
    with pytest.raises(ConfigError, match=message):
        layouts_with("parallel.pp=3", "parallel.stage_devices=[1,2,1]", setting)
