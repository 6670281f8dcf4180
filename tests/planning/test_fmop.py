"""When a switch of layout gains most, over the steps that both layouts hold."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenload.errors import ConfigError
from evenload.planning.layouts.flex_planner import Decision, FlexState, Outlook, decide, state_after
from evenload.planning.layouts.layout_plans import LayoutOutcome
from evenload.planning.strategies.flexpipe import FlexOptions
from evenload.types.layout import even_layout

NEVER = math.inf
PUBLISHED = FlexOptions(margin=0.0, patience_steps=1)
STATE = FlexState(layout=even_layout(4, dp=2, pp=2))


def letters_of(result: Decision) -> str:
    held = (result.fits, result.switching_is_slower, result.fits_saving, result.switching_is_slower_than_saving)
    return " ".join(letter if holds else f"not {letter}" for letter, holds in zip("ABCD", held, strict=True))


@pytest.mark.parametrize(
    ("keep_s", "save_s", "new_s", "switch_s", "action", "letters"),
    [
        (10.0, 10.0, 9.0, 1.0, "stay", "A B C D"),  # equal: nothing is won
        (10.0, 10.0, 8.0, 1.0, "switch", "A not B C not D"),
        # T of a layout beyond memory is infinite, hence FlexPipe's "B must also be false".
        (NEVER, 12.0, 11.0, 1.0, "save memory", "not A not B C D"),
        (NEVER, 12.0, 10.0, 1.0, "switch", "not A not B C not D"),
        (NEVER, NEVER, 10.0, 1.0, "switch", "not A not B not C not D"),
        (10.0, 10.0, NEVER, 0.0, "stay", "A B C D"),  # no other layout holds the batch
        (NEVER, 12.0, NEVER, 0.0, "save memory", "not A B C D"),
    ],
)
def test_every_case_of_equation_7(keep_s, save_s, new_s, switch_s, action, letters) -> None:
    result = decide(Outlook(keep_s, save_s, new_s, switch_s), STATE, PUBLISHED)
    assert result.action == action
    assert letters_of(result) == letters


def test_margin_asks_for_more_than_nothing() -> None:
    options = FlexOptions(margin=0.1)
    assert decide(Outlook(10.0, 10.0, 8.5, 0.6), STATE, options).action == "stay"
    assert decide(Outlook(10.0, 10.0, 8.3, 0.6), STATE, options).action == "switch"
    assert decide(Outlook(NEVER, 10.0, 8.5, 0.6), STATE, options).action == "save memory"


def test_only_a_switch_that_pays_several_times_in_a_row_is_made() -> None:
    """Batches that alternate between two layouts must not move the model back and forth."""
    options = FlexOptions(margin=0.0, patience_steps=2)
    faster, slower = Outlook(10.0, 10.0, 1.0, 1.0), Outlook(10.0, 10.0, 20.0, 1.0)
    saving, forced = Outlook(NEVER, 10.0, 1.0, 1.0), Outlook(NEVER, NEVER, 1.0, 1.0)

    def actions(outlooks: list[Outlook], state: FlexState) -> list[str]:
        result = []
        for step, outlook in enumerate(outlooks):
            decision = decide(outlook, state, options)
            result.append(decision.action)
            state = state_after(decision, step, state, state.layout if decision.action == "switch" else None)
        return result

    switched = FlexState(layout=STATE.layout, switched_at=5)
    assert actions([faster, slower] * 3, switched) == ["stay"] * 6
    assert actions([faster, faster, faster], switched) == ["stay", "switch", "stay"]
    assert actions([saving, faster], switched) == ["save memory", "switch"]
    assert actions([forced, forced], switched) == ["switch", "switch"]
    assert actions([faster, faster], STATE) == ["switch", "stay"]
    assert decide(faster, switched, options).is_patient


def test_a_switch_that_gains_most_later_waits_and_needs_no_patience_then() -> None:
    options = FlexOptions(margin=0.0, patience_steps=2)
    later, now = Outlook(10.0, 10.0, 1.0, 1.0, later_steps=2), Outlook(10.0, 10.0, 1.0, 1.0)
    waiting = decide(later, STATE, options)
    assert (waiting.action, waiting.later_steps, waiting.is_patient) == ("stay", 2, False)
    assert decide(Outlook(NEVER, 10.0, 1.0, 1.0, later_steps=2), STATE, options).action == "save memory"
    assert decide(Outlook(10.0, 10.0, 20.0, 1.0, later_steps=2), STATE, options).later_steps == 0, "none would pay"
    forced = decide(Outlook(NEVER, NEVER, 1.0, 1.0, later_steps=2), STATE, options)
    assert (forced.action, forced.later_steps) == ("switch", 0)
    after = state_after(waiting, 6, FlexState(layout=STATE.layout, switched_at=5), None)
    assert after.paying_steps == 1
    assert decide(now, after, options).action == "switch"


@pytest.mark.parametrize(
    "options", [{"known_steps": 0}, {"finalists": 0}, {"patience_steps": 0}, {"overhead_s": -0.1}, {"margin": 1.0}]
)
def test_options_that_nothing_can_satisfy_are_refused(options) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        FlexOptions(**options)


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
    result = [outcome(one_s, min(holds_one, len(steps)), switch_s), outcome(other_s, min(holds_other, len(steps)), 1.0)]

    def least(one):
        """Seconds over those of staying, and the first point that gives them."""
        count = min(one.holds, keep.holds)
        ways = [
            sum(keep.step_s[:t]) + one.switch_s + sum(one.step_s[t:count]) - sum(keep.step_s[:count])
            for t in range(count)
        ]
        return min(ways), ways.index(min(ways))

    if not keep.holds:
        assert [one.later_steps(keep) for one in result] == [0, 0]
        return
    for one in result:
        seconds, at = least(one)
        assert one.later_steps(keep) == at
        assert one.order(keep) == (0, seconds)
