"""Megatron's schedulers as benchmarks/dynamic_cp_peer.py restates them, by hand."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from dynamic_cp_peer import default_dynamic_cp, dp_balanced


def test_packs_in_arrival_order_for_all_context_ranks():
    # Room for 8 tokens a pack: [5 3] [6] [4 4]; two replicas need a fourth pack, which the last one gives away.
    assert dp_balanced([5, 3, 6, 4, 4], dp=2, cp=2, room_tokens=4) == (
        ((0, 1), (0, 1), (2,), (2,)),
        ((3,), (3,), (4,), (4,)),
    )


def test_the_longest_opens_a_micro_batch_and_others_join_where_the_busiest_rank_stays_least_busy():
    # 8 tokens need two of four ranks: work 8 * 8 / 2 = 32. The next (4) opens a rank, 16; so does the last.
    assert default_dynamic_cp([8, 4, 4], num_ranks=4, room_tokens=4) == (((0,), (0,), (1,), (2,)),)


def test_ranks_left_free_join_the_smallest_group():
    assert default_dynamic_cp([8, 4], num_ranks=4, room_tokens=4) == (((0,), (0,), (1,), (1,)),)


def test_what_does_not_fit_waits():
    # Work is limited to 1.05 * 4 * 4; a rank holds 4 tokens: two at once, the third waits.
    assert default_dynamic_cp([4, 4, 4], num_ranks=2, room_tokens=4) == (((0,), (1,)), ((2,), (2,)))
