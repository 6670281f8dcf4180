"""Fifty runs, each with a rank that is killed at a random moment: they go on, and train what an undisturbed run trains.

    pytest tests/dist/test_kill_campaign.py --hypothesis-profile=explore -s

takes a quarter of an hour on two cores and prints a line a run and the counts of docs/training.md.
"""

import signal
from collections import Counter

import pytest

from kill_campaign import KINDS, Campaign, Kill, Outcome, drawn_kills
from sweeps import sweep

SEEDS = sweep(range(54), few=0)
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not SEEDS, reason="a campaign of a quarter of an hour: make test-thorough"),
]


def require_same_training(outcome: Outcome) -> None:
    assert outcome.end == "went on", outcome
    assert outcome.steps_again == 0, outcome
    assert outcome.difference <= 1e-10, outcome


def test_whoever_is_killed_at_any_moment_the_others_finish_the_run(tmp_path):
    campaign, ends, worst = Campaign(tmp_path), Counter(), 0.0
    for seed in SEEDS:
        outcome = campaign.run(f"seed-{seed}", drawn_kills(seed))
        print(seed, outcome, flush=True)
        ends[KINDS[seed % len(KINDS)], outcome.end, outcome.num_killed] += 1
        worst = max(worst, outcome.difference)
        require_same_training(outcome)
    print(dict(ends), f"largest relative difference {worst:.1e}")


def test_processes_that_come_for_killed_ones_take_over_what_those_kept(tmp_path):
    campaign = Campaign(tmp_path, replacements=2)
    for seed in (1, 6, 8, 17):
        require_same_training(campaign.run(f"seed-{seed}", drawn_kills(seed)))


def test_a_rank_that_stands_still_is_left_out_and_ended_before_others_read_what_it_kept(tmp_path):
    """In the middle of an update, and of the copy of a step."""
    campaign = Campaign(tmp_path)
    for place in ("update", "kept state"):
        stopped = Kill(2, place, 4, 0.5, how=signal.SIGSTOP)
        outcome = campaign.run(place, (stopped,))
        assert outcome.num_killed == 1
        require_same_training(outcome)
