"""Groups that a planner counts are those that are made."""

from evenload.plan.layouts.layout_candidates import num_groups
from evenload.types.layout import even_layout
from mesh_groups import groups_made


def test_groups_of_layouts_are_as_many_as_counted(gloo_pool):
    """What every run makes beside those of its layouts is the same for all sets of several layouts."""
    first = (even_layout(8, dp=4), even_layout(8, dp=2, pp=2))
    others = (
        (
            even_layout(8, pp=4),
            even_layout(8, dp=2, pp=2),
            even_layout(8, dp=4),
            even_layout(8, pp=3, devices=[1, 2, 1]),
        ),
        (even_layout(8, pp=2, tp=2), even_layout(8, dp=2, tp=2)),
        (even_layout(8, dp=2, cp=2), even_layout(8, pp=2, cp=2), even_layout(8, pp=2, cp=2, virtual=2)),
    )
    beside = gloo_pool.run(4, groups_made, first)[0] - num_groups(first)
    assert beside > 0
    for layouts in others:
        assert gloo_pool.run(4, groups_made, layouts)[0] == beside + num_groups(layouts)
