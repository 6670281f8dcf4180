"""Halves of ranges."""

import random

from evenload.types.token_range import Range, divide_ranges


def rows(ranges):
    return [(r.doc_id, token) for r in ranges for token in range(r.start, r.stop)]


def test_both_halves_hold_all_rows_in_order():
    rng = random.Random(5)
    for _ in range(50):
        ranges = tuple(Range(doc, start := rng.randint(0, 3), start + rng.randint(1, 5)) for doc in range(4))
        for first_rows in range(len(rows(ranges)) + 1):
            first, second = divide_ranges(ranges, first_rows)
            assert rows(first) == rows(ranges)[:first_rows]
            assert rows(second) == rows(ranges)[first_rows:]
