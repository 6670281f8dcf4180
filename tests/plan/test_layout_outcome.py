"""When a switch of layout gains most, over the steps that both layouts hold."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from evenload.plan.layouts.layout_plans import LayoutOutcome

NOT_ASKED: Any = None


def outcome(step_s, holds=None, switch_s=0.0):
    """Without its plans, which the comparison does not read."""
    return LayoutOutcome(
        layout=NOT_ASKED, proposal=NOT_ASKED, plans=NOT_ASKED, step_s=tuple(step_s), switch_s=switch_s,
        holds=len(step_s) if holds is None else holds,
    )  # fmt: skip


SECONDS = st.integers(1, 9).map(float)


@given(
    st.lists(st.tuples(SECONDS, SECONDS, SECONDS), min_size=1, max_size=6),
    st.integers(0, 6),
    st.integers(1, 6),
    st.integers(1, 6),
    SECONDS,
)
def test_the_best_of_all_ways_to_switch_once_comes_first(steps, keep_holds, holds_one, holds_other, switch_s):
    """Brute force: run the current layout for some steps, then the other one."""
    keep_s, one_s, other_s = zip(*steps, strict=True)
    keep = outcome(keep_s, min(keep_holds, len(steps)))
    found = [
        outcome(one_s, min(holds_one, len(steps)), switch_s),
        outcome(other_s, min(holds_other, len(steps)), 1.0),
    ]

    def least(one):
        """Seconds over those of staying, and the first point that gives them."""
        count = min(one.holds, keep.holds)
        ways = [
            sum(keep.step_s[:t]) + one.switch_s + sum(one.step_s[t:count]) - sum(keep.step_s[:count])
            for t in range(count)
        ]
        return min(ways), ways.index(min(ways))

    if not keep.holds:
        assert [one.later_steps(keep) for one in found] == [0, 0]
        return
    for one in found:
        seconds, at = least(one)
        assert one.later_steps(keep) == at
        assert one.order(keep) == (0, seconds)
