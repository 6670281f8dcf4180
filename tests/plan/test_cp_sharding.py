"""Rules of sharding: every token on one rank, even where they promise it, and the best of what they try."""

import gzip
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenload.errors import ConfigError
from evenload.plan.sharing.cp_sharding import pack_shardings, share_packs
from evenload.plan.sharing.sharding_cost import ShardingCost
from evenload.stepplan.rank_ranges import RankRanges, joined, ranges_by_owner, ranges_per_sequence
from evenload.types.columns import SliceColumns
from evenload.types.micropack import PackSharding
from evenload.types.work import WorkCurve

LENGTH_TABLES = Path(__file__).parents[2] / "examples" / "lengths"
WORK = WorkCurve(linear_s=1.0, attention_s=((1e-3, 0),), slice_s=0.5)
COST = ShardingCost(WORK, tile=8, gather_s_per_token=0.05)
PIECES = st.lists(st.tuples(st.integers(0, 300), st.integers(1, 400)), min_size=1, max_size=12)
RANKS = st.sampled_from([1, 2, 3, 4, 8])


def columns(pieces) -> tuple[np.ndarray, np.ndarray]:
    start = np.array([a for a, _ in pieces], np.int64)
    return start, start + np.array([n for _, n in pieces], np.int64)


def ranges_of(sharding: PackSharding, start: np.ndarray, stop: np.ndarray, cp: int) -> RankRanges:
    offset = np.array([0, len(start)])
    if sharding == "per_sequence":
        return ranges_per_sequence(start, stop, offset, cp)
    owner = np.full(len(start), -1) if sharding == "per_document" else np.array(sharding)
    return ranges_by_owner(start, stop, owner, offset, cp)


def share_pack(rule, start, stop, cp, cost) -> tuple[RankRanges, np.ndarray]:
    """One pack's ranges and every rank's seconds."""
    found = share_packs(rule, start, stop, cp, cost)
    return ranges_of(found.shardings[0], start, stop, cp), found.rank_s[0]


def slowest_s(rule, start, stop, cp, cost) -> float:
    return float(share_packs(rule, start, stop, cp, cost).rank_s.max())


def rank_tokens(found: RankRanges, cp: int) -> np.ndarray:
    return np.bincount(found.rank, weights=found.stop - found.start, minlength=cp)


def assert_covers_once(found: RankRanges, start, stop) -> None:
    for piece, (lo, hi) in enumerate(zip(start, stop, strict=True)):
        mine = found.piece == piece
        ranges = sorted(zip(found.start[mine].tolist(), found.stop[mine].tolist(), strict=True))
        assert [a for a, _ in ranges] == [lo, *(b for _, b in ranges[:-1])]
        assert ranges[-1][1] == hi
    assert (found.stop > found.start).all()


@settings(max_examples=150)
@given(PIECES, RANKS, st.sampled_from(["per_sequence", "per_document", "adaptive", "mixed"]))
def test_every_token_is_computed_by_one_rank(pieces, cp, rule) -> None:
    start, stop = columns(pieces)
    found, _ = share_pack(rule, start, stop, cp, COST)
    assert_covers_once(found, start, stop)
    if rule != "mixed":
        tokens = rank_tokens(found, cp)
        assert tokens.max() - tokens.min() <= 1
    assert 0 <= found.rank.min() <= found.rank.max() < cp


@settings(max_examples=100)
@given(PIECES, RANKS, st.data())
def test_slices_with_an_owner_stay_whole(pieces, cp, data) -> None:
    start, stop = columns(pieces)
    owner = data.draw(st.lists(st.integers(-1, cp - 1), min_size=len(pieces), max_size=len(pieces)))
    found = ranges_of(tuple(owner), start, stop, cp)
    assert_covers_once(found, start, stop)
    for piece in np.flatnonzero(np.array(owner) >= 0):
        assert found.rank[found.piece == piece].tolist() == [owner[piece]]


@settings(max_examples=100)
@given(st.lists(PIECES, min_size=1, max_size=6), RANKS, st.sampled_from(["adaptive", "mixed"]), st.data())
def test_many_packs_are_shared_as_each_alone(packs, cp, rule, data) -> None:
    """And per_sequence is no choice where backward packs have other cuts."""
    start, stop = columns([piece for pieces in packs for piece in pieces])
    offset = np.cumsum([0, *map(len, packs)])
    is_cut = np.array(data.draw(st.lists(st.booleans(), min_size=len(packs), max_size=len(packs))))
    found = share_packs(rule, start, stop, cp, COST, offset, is_cut)
    alone = [share_packs(rule, *columns(one), cp, COST, None, is_cut[i : i + 1]) for i, one in enumerate(packs)]
    assert found.shardings == tuple(one.shardings[0] for one in alone)
    np.testing.assert_allclose(found.rank_s, [one.rank_s[0] for one in alone], rtol=1e-9)
    assert not any(name == "per_sequence" for name, is_cut in zip(found.shardings, is_cut, strict=True) if is_cut)


def slice_columns(packs, cp) -> SliceColumns:
    """Packs of (document, start, stop)."""
    doc, start, stop = (np.array(column) for column in zip(*(s for pack in packs for s in pack), strict=True))
    offset = np.cumsum([0, *map(len, packs)])
    return SliceColumns(doc.astype(np.int32), start, stop, offset, np.zeros(len(packs), np.int64), cp)


def test_plans_name_what_was_decided() -> None:
    """Packs of one rank get nothing, groups of other sizes their own costs, cuts inside a slice no per_sequence."""
    even = ShardingCost(WorkCurve(linear_s=1.0, slice_s=5.0))  # pieces cost: one long sequence is best
    packs = [[(0, 0, 40), (1, 0, 40)], [(2, 0, 40), (3, 0, 40)], [(4, 0, 40)]]
    forward = slice_columns(packs, np.array([4, 4, 2, 2, 1]))
    asked = []
    found = pack_shardings("adaptive", forward, forward, lambda cp: asked.append(cp) or even)
    assert found == ("per_sequence", "per_sequence", "")
    assert asked == [2, 4]
    backward = slice_columns(
        [[(1, 0, 40)], [(0, 7, 40)], [(0, 0, 7)], packs[1], packs[2]], np.array([4, 4, 4, 2, 2, 1])
    )
    assert pack_shardings("adaptive", forward, backward, lambda _: even) == ("per_document", "per_sequence", "")
    assert pack_shardings("per_sequence", forward, backward, lambda _: even) == ("per_sequence", "per_sequence", "")
    assert pack_shardings("mixed", forward, backward, lambda _: even)[2] == ""


@settings(max_examples=150)
@given(PIECES, RANKS)
def test_mixed_is_never_worse_than_adaptive_and_adaptive_is_the_better_of_two(pieces, cp) -> None:
    start, stop = columns(pieces)
    seconds = {
        rule: slowest_s(rule, start, stop, cp, COST) for rule in ("per_sequence", "per_document", "adaptive", "mixed")
    }
    assert seconds["adaptive"] == min(seconds["per_sequence"], seconds["per_document"])
    assert seconds["mixed"] <= seconds["adaptive"]


def row_by_row_seconds(found: RankRanges, cp: int, cost: ShardingCost) -> np.ndarray:
    """Compute of every rank, counted one query row at a time; transfers left out. Rows side by side are one range."""
    seconds, found = np.zeros(cp), joined(found)
    for rank, start, stop in zip(found.rank.tolist(), found.start.tolist(), found.stop.tolist(), strict=True):
        rows = [*range(start, stop), *[stop - 1] * (-(stop - start) % cost.tile)]  # incomplete tiles at full price
        seconds[rank] += cost.work.slice_s + cost.work.linear_s * (stop - start)
        for coefficient, window in cost.work.attention_s:
            seconds[rank] += coefficient * sum(min(row + 1, window or row + 1) for row in rows)
    return seconds


WINDOWED = WorkCurve(linear_s=1.0, attention_s=((1e-3, 0), (3e-3, 50)), slice_s=0.5)


@settings(max_examples=60, deadline=None)
@given(PIECES, RANKS, st.sampled_from([1, 8, 64]), st.sampled_from([WORK, WINDOWED]))
def test_rules_keep_their_promise_when_rows_are_counted_one_by_one(pieces, cp, tile, work) -> None:
    """The rules choose by closed forms; a wrong one would choose wrongly and still look best by its own figures."""
    start, stop = columns(pieces)
    cost = ShardingCost(work, tile=tile)
    counted = {}
    for rule in ("per_sequence", "per_document", "adaptive", "mixed"):
        found, rank_s = share_pack(rule, start, stop, cp, cost)
        counted[rule] = row_by_row_seconds(found, cp, cost).max()
        assert rank_s == pytest.approx(row_by_row_seconds(found, cp, cost), rel=1e-9)
    assert counted["adaptive"] <= 1.01 * min(counted["per_sequence"], counted["per_document"])
    assert counted["mixed"] <= counted["adaptive"] * (1 + 1e-9)


@settings(max_examples=100)
@given(st.data(), st.sampled_from([2, 3, 4, 8, 16]), st.integers(1, 4))
def test_long_documents_are_shared_evenly_whatever_their_remainders_and_prefixes(data, cp, count) -> None:
    """Beyond the tables: tokens equal within one, work within 0.1 %, for any length that is long for cp."""
    lengths = data.draw(st.lists(st.integers(4096 * cp, 16_384 * cp), min_size=count, max_size=count))
    prefixes = data.draw(st.lists(st.integers(0, 100_000), min_size=count, max_size=count))
    start = np.array(prefixes, np.int64)
    found, rank_s = share_pack("per_document", start, start + np.array(lengths), cp, ShardingCost(WORK))
    tokens = rank_tokens(found, cp)
    assert tokens.max() - tokens.min() <= 1
    assert rank_s.max() / rank_s.mean() <= 1.001


def test_tokens_beyond_whole_chunks_are_spread_over_all_documents() -> None:
    """A thousand documents with one odd token each, which opens a tile: always in the early chunk costs 1.5 %."""
    cp = 4
    lengths = np.full(1000, 2 * cp * 128 + 1)
    found, rank_s = share_pack("per_document", np.zeros_like(lengths), lengths, cp, ShardingCost(WORK, tile=128))
    tokens = rank_tokens(found, cp)
    assert tokens.max() - tokens.min() <= 1
    # Nearly: the last rank's two chunks are one range, whose odd token opens its tile at the end.
    assert rank_s.max() / rank_s.mean() <= 1.004


@pytest.mark.parametrize("table", ["github_dirs", "docs", "stdlib", "books"])
@pytest.mark.parametrize("cp", [2, 8])
def test_adaptive_and_mixed_on_real_lengths(table, cp) -> None:
    """Transfers and tiles included; on packs of 64K tokens as they come."""
    with gzip.open(LENGTH_TABLES / f"{table}.npy.gz") as file:
        lengths = np.minimum(np.load(file), 65_536)[:4000].astype(np.int64)
    work = WorkCurve(linear_s=0.63, attention_s=((3e-5, 0),), slice_s=1.0)
    cost = ShardingCost(work, tile=128, gather_s_per_token=0.05)
    for pack in np.split(lengths, np.flatnonzero(np.diff(np.cumsum(lengths) // 65_536)) + 1)[:20]:
        seconds = {
            rule: slowest_s(rule, np.zeros_like(pack), pack, cp, cost)
            for rule in ("per_sequence", "per_document", "adaptive", "mixed")
        }
        assert seconds["adaptive"] <= 1.01 * min(seconds["per_sequence"], seconds["per_document"])
        assert seconds["mixed"] <= seconds["adaptive"]


def test_ranges_and_seconds_by_hand() -> None:
    """10 tokens on 2 ranks: chunks of 3, 3, 2, 2; the two odd tokens go to one rank each."""
    cost = ShardingCost(WorkCurve(linear_s=1.0, attention_s=((0.1, 0),), slice_s=0.5), tile=1)
    found, rank_s = share_pack("per_document", np.array([0]), np.array([10]), 2, cost)
    ranges = sorted(zip(found.rank.tolist(), found.start.tolist(), found.stop.tolist(), strict=True))
    assert ranges == [(0, 0, 3), (0, 8, 10), (1, 3, 6), (1, 6, 8)]
    pairs = [3 * 4 / 2 + (10 * 11 - 8 * 9) / 2, (8 * 9 - 3 * 4) / 2]
    assert rank_s == pytest.approx([5 + 0.1 * pairs[0] + 1.0, 5 + 0.1 * pairs[1] + 0.5])  # rank 1's two are one range
    # Two documents of 4 as one sequence: the second chunk pair lies in the middle, across both.
    sequence, _ = share_pack("per_sequence", np.array([0, 0]), np.array([4, 4]), 2, cost)
    assert sorted(zip(sequence.rank.tolist(), sequence.piece.tolist(), sequence.start.tolist(), strict=True)) == [
        (0, 0, 0),
        (0, 1, 2),
        (1, 0, 2),
        (1, 1, 0),
    ]


def test_incomplete_tiles_make_short_documents_stay_whole() -> None:
    start, stop = columns([(0, 16)] * 32)
    cost = ShardingCost(WorkCurve(linear_s=0.01, attention_s=((1.0, 0),)), tile=16)
    assert slowest_s("mixed", start, stop, 4, cost) < 0.5 * slowest_s("per_document", start, stop, 4, cost)


@pytest.mark.parametrize("table", ["github_dirs", "docs", "stdlib", "books"])
@pytest.mark.parametrize("cp", [2, 4, 8])
def test_per_document_rows_are_even_on_real_lengths(table, cp) -> None:
    """max/mean <= 1.002 for one pack of about 256K tokens, with tiles and constants; the last rank, whose two chunks
    are one range, has a little less."""
    with gzip.open(LENGTH_TABLES / f"{table}.npy.gz") as file:
        lengths = np.minimum(np.load(file), 131_072)[:3000].astype(np.int64)
    stop = lengths[: np.searchsorted(np.cumsum(lengths), 262_144)]
    # Of llama-7b on H100, microseconds.
    cost = ShardingCost(WorkCurve(linear_s=0.63, attention_s=((3e-5, 0),), slice_s=1.0), tile=128)
    for tile in (1, 128):
        _, rank_s = share_pack("per_document", np.zeros_like(stop), stop, cp, ShardingCost(cost.work, tile))
        assert rank_s.max() / rank_s.mean() <= 1.002


def test_misuse_is_named() -> None:
    start, stop = columns([(0, 8)])
    with pytest.raises(ConfigError, match="unknown cp sharding 'zigzag'"):
        share_packs("zigzag", start, stop, 2, COST)
    with pytest.raises(ConfigError, match="cp is 0"):
        share_packs("mixed", start, stop, 0, COST)
