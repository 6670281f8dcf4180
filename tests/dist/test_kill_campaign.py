"""Fifty runs, each with a rank that is killed at a random moment: they go on, and train what an undisturbed run trains.

    pytest tests/dist/test_kill_campaign.py --hypothesis-profile=explore -s

takes about ten minutes on two cores and prints a line a run and the counts of docs/training.md.
"""

from collections import Counter

import pytest

from kill_campaign import KINDS, Campaign
from sweeps import sweep

SEEDS = sweep(range(54), few=0)


@pytest.mark.long
@pytest.mark.skipif(not SEEDS, reason="a campaign of ten minutes: make test-thorough")
def test_whoever_is_killed_at_any_moment_the_others_finish_the_run(tmp_path):
    campaign, ends, worst = Campaign(tmp_path), Counter(), 0.0
    for seed in SEEDS:
        outcome = campaign.run(seed)
        print(seed, outcome, flush=True)
        ends[KINDS[seed % len(KINDS)], outcome.end, outcome.num_killed] += 1
        worst = max(worst, outcome.difference)
        assert outcome.end == "went on", outcome
        assert outcome.steps_again == 0, outcome
        assert outcome.difference <= 1e-10, outcome
    print(dict(ends), f"largest relative difference {worst:.1e}")
