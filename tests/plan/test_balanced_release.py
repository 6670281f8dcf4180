"""Which documents `wlb` lets wait: steps made by hand, the definition by brute force, the rules of age and delay."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenload.plan.deferral import EASY_DELAY_STEPS, TIGHT_DEGREE, AtHand, release_balanced


def hand(works: list[float], n: int, **fields) -> AtHand:
    """New documents that may all wait."""
    work_s = np.array(works, np.float64)
    plain = {
        "age_steps": np.zeros(len(works), np.int64),
        "must": np.zeros(len(works), bool),
        "may_wait": np.ones(len(works), bool),
        "new_work_s": float(work_s.sum()),
        "max_delay_steps": 8,
        "recent_delay_steps": EASY_DELAY_STEPS + 1e-6,  # the limit is still tight, nothing is saved up
    }
    return AtHand(work_s=work_s, num_micro_batches=n, **(plain | fields))


def degree(works: list[float], n: int) -> float:
    """max·N / total, longest first."""
    loads = [0.0] * n
    for work in sorted(works, reverse=True):
        loads[loads.index(min(loads))] += work
    return max(loads) * n / sum(loads)


def test_a_lone_long_document_waits_and_goes_with_its_equals() -> None:
    assert release_balanced(hand([1, 10, 1, 1, 1], 2)).tolist() == [True, False, True, True, True]
    assert release_balanced(hand([1, 10, 1, 1, 10, 1], 2)).all()
    # Three on two micro-batches would be 20 against 12; the ones that wait are twins.
    assert release_balanced(hand([10, 10, 10, 1, 1], 2)).tolist() == [False, False, False, True, True]


works = st.lists(st.sampled_from([0.5, 1.0, 1.5, 2.0, 3.0, 5.0, 8.0, 13.0]), min_size=1, max_size=8)


@given(works, st.integers(1, 4))
def test_fewest_documents_wait_that_leave_the_step_even(values, n) -> None:
    due = release_balanced(hand(values, n))
    chosen = [work for work, is_due in zip(values, due.tolist(), strict=True) if is_due]
    assert chosen, "a step never trains nothing"
    assert max(chosen) <= min([work for work, is_due in zip(values, due, strict=True) if not is_due], default=np.inf)
    # All documents up to a bar; the first bar that leaves the step even wins, else the most even one.
    steps = [[work for work in values if work <= bar] for bar in sorted(set(values), reverse=True)]
    even = [step for step in steps if degree(step, n) <= TIGHT_DEGREE]
    if even:
        assert sorted(chosen) == sorted(even[0])
    else:
        assert degree(chosen, n) == pytest.approx(min(degree(step, n) for step in steps))


@given(
    works,
    st.integers(1, 4),
    st.lists(st.integers(0, 9), min_size=8, max_size=8),
    st.lists(st.booleans(), min_size=8, max_size=8),
    st.floats(0, 2),
)
def test_overdue_are_always_trained(values, n, ages, may_wait, delay) -> None:
    age = np.array(ages[: len(values)])
    given_hand = hand(
        values, n, age_steps=age, must=age >= 8, may_wait=np.array(may_wait[: len(values)]), recent_delay_steps=delay
    )
    due = release_balanced(given_hand)
    assert due.any()
    assert due[given_hand.must | ~given_hand.may_wait].all()


def test_work_is_saved_up_for_a_rare_long_document() -> None:
    """Without it the step that must train the document holds little else, and is as uneven as the document is long."""
    new = np.linspace(6, 1, 100)  # 350 seconds
    works, ages = np.array([60.0]), np.array([-1])
    waiting = []
    for _ in range(7):
        works, ages = np.concatenate([works, new]), np.concatenate([ages + 1, np.zeros(100, np.int64)])
        at_hand = hand(works.tolist(), 16, age_steps=ages, new_work_s=350.0, recent_delay_steps=0.0)
        due = release_balanced(at_hand)
        works, ages = works[~due], ages[~due]
        waiting.append(float(works.sum()))
    assert works.max() == 60
    saved = np.diff([60.0, *waiting])
    assert (saved > 0).all()
    assert saved.max() <= 0.2 * 350 + 6 + 1e-9


def test_delay_makes_the_limit_looser() -> None:
    step = hand([10, 7, 7, 7, 7, 1, 1, 1], 4)
    num_due = [
        int(release_balanced(dataclasses.replace(step, recent_delay_steps=delay)).sum()) for delay in (0.4, 0.6, 9.0)
    ]
    assert num_due == sorted(num_due)
    assert num_due[0] < num_due[-1] == len(step.work_s)


@pytest.mark.parametrize("n", [1, 7])
def test_no_work_and_no_documents_are_no_error(n) -> None:
    assert release_balanced(hand([0.0, 0.0], n)).any()
    assert release_balanced(hand([], n)).shape == (0,)
