"""Layouts of a run that declares none."""

import pytest

from evenload.planning.layouts.layout_candidates import enumerated_layouts, num_groups
from evenload.types.layout import even_layout, split_layout


def described(start, most_layouts=100, most_groups=10**6, *, part_pipelines=False):
    result = enumerated_layouts(start, most_layouts, most_groups, part_pipelines=part_pipelines)
    return [one.describe() for one in result]


def test_depths_that_use_all_processes_come_first_the_nearest_before_others():
    assert described(even_layout(8, dp=4)) == ["dp=2 pp=2", "pp=4", "pp=3"]
    assert described(even_layout(8, dp=2, pp=4)) == [
        *("dp=4 pp=2", "pp=8", "dp=8"),  # an octave away, the shallower first; then two octaves
        *("pp=7", "dp=2 pp=3", "pp=6", "pp=5"),  # one rank idle, two, two, three
    ]


def test_processes_are_idle_only_where_stages_cannot_have_different_numbers_of_them():
    assert described(even_layout(8, dp=4), part_pipelines=True) == [
        *("dp=2 pp=2", "pp=4"),
        *("pp=3 devices=1+1+2", "pp=3 devices=2+1+1"),
    ]
    assert described(even_layout(8, pp=3), part_pipelines=True) == ["dp=3", "pp=2 devices=1+2", "pp=2 devices=2+1"]
    # Nothing else is tested with context or tensor parallelism.
    assert described(even_layout(8, dp=3, tp=2), part_pipelines=True) == ["pp=3 tp=2", "pp=2 tp=2"]


def test_a_start_that_is_split_unevenly_may_become_the_even_one():
    assert described(split_layout([3, 5], pp=2)) == ["pp=2", "dp=2"]
    assert described(even_layout(8, pp=2)) == ["dp=2"]


def test_no_more_stages_than_layers_and_cp_and_tp_stay():
    assert described(even_layout(2, dp=4, cp=2)) == ["dp=2 cp=2 pp=2"]
    assert described(even_layout(8, tp=2)) == []
    assert described(even_layout(1, dp=4)) == []


def test_layouts_and_groups_are_bounded():
    start = even_layout(16, dp=16)
    assert described(start, most_layouts=3) == described(start)[:2]
    for most_groups in (10, 40, 80, 200):
        result = enumerated_layouts(start, 100, most_groups, part_pipelines=True)
        needed = num_groups([start, *result]) - num_groups([start])
        assert needed <= most_groups
    few = num_groups([start, even_layout(16, dp=8, pp=2)]) - num_groups([start])
    assert described(start, most_groups=few) == ["dp=8 pp=2"]
    assert "dp=8 pp=2" not in described(start, most_groups=few - 1)


@pytest.mark.parametrize(
    ("layouts", "groups"),
    [
        # The sum over replicas alone; four ranks share documents by two, by three and by four.
        ([even_layout(4, dp=2)], 1 + 1),
        ([even_layout(4, dp=4)], 1 + 2 + 1 + 1),
        # A sum a stage of one rank; one channel each way; both ends.
        ([even_layout(4, pp=2)], 2 + 2 + 1),
        # The pair of ranks 0 and 1 has three groups as a pipeline, and two of them serve as replicas.
        ([even_layout(4, pp=2), even_layout(4, dp=2)], 2 + 2 + 1),
    ],
)
def test_groups_are_counted_by_hand(layouts, groups):
    assert num_groups(layouts) == groups
