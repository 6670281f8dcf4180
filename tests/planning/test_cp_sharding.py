"""What rules of sharding may choose from: every token on one rank, even where they promise it, priced as counted."""

import gzip
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_samples import documents, sample_coefficients, sample_model
from evenload.cost.coefficients import PassCoefficients
from evenload.cost.pack_cost import PackCosts
from evenload.cost.pack_pricing import rank_seconds
from evenload.planning.cp_sharding import possible_shardings
from evenload.planning.planner import StepPlanner
from evenload.planning.problem import PlanOptions
from evenload.stepplan.cp_rows import RankRanges, joined, ranges_by_owner, ranges_per_sequence, ranked_packs
from evenload.types.cluster import LinkSpec
from evenload.types.columns import SliceColumns, WorkCurve
from evenload.types.document import PackSharding
from evenload.types.layout import even_layout

LENGTH_TABLES = Path(__file__).parents[2] / "examples" / "lengths"
WORK = WorkCurve(linear_s=1.0, attention_s=((1e-3, 0),), slice_s=0.5)
PIECES = st.lists(st.tuples(st.integers(0, 300), st.integers(1, 400)), min_size=1, max_size=12)
RANKS = st.sampled_from([1, 2, 3, 4, 8])
RULES = ("per_sequence", "per_document", "adaptive", "mixed")
FREE = LinkSpec(bandwidth_bytes_per_s=1e18, latency_s=0.0)
NO_ENDS = {"embedding_s_per_token": 0.0, "head_s_per_token": 0.0, "head_pack_s": 0.0}


def columns(pieces) -> tuple[np.ndarray, np.ndarray]:
    start = np.array([a for a, _ in pieces], np.int64)
    return start, start + np.array([n for _, n in pieces], np.int64)


def costs_of(cp: int, work: WorkCurve = WORK, tile: int = 8) -> PackCosts:
    """Of layers whose forwards take the work, all backwards and transfers nothing."""
    windows = tuple(window for _, window in work.attention_s)
    passes = {
        "forward": PassCoefficients(
            linear_s_per_token=work.linear_s / len(windows),
            attention_s_per_pair=work.attention_s[0][0],
            slice_s=work.slice_s / len(windows),
        ),
        "backward": PassCoefficients(linear_s_per_token=0.0, attention_s_per_pair=0.0),
    }
    coefficients = sample_coefficients(attention_tile=tile, intra_node=FREE, devices_per_node=8, **passes, **NO_ENDS)
    model = sample_model(num_layers=len(windows), sliding_windows=windows)
    return PackCosts(model, coefficients, even_layout(len(windows), cp=cp))


def packs_of(packs, cp: int) -> SliceColumns:
    """Packs of (start, tokens), each of a document of its own."""
    start, stop = columns([piece for pieces in packs for piece in pieces])
    offset, doc = np.cumsum([0, *map(len, packs)]), np.arange(len(start), dtype=np.int32)
    return SliceColumns(doc, start, stop, offset, np.zeros(len(packs), np.int64), np.full(len(start), cp))


def ranges_of(sharding: PackSharding, start: np.ndarray, stop: np.ndarray, cp: int) -> RankRanges:
    offset = np.array([0, len(start)])
    if sharding == "per_sequence":
        return ranges_per_sequence(start, stop, offset, cp)
    owner = np.full(len(start), -1) if sharding in ("", "per_document") else np.array(sharding)
    return ranges_by_owner(start, stop, owner, offset, cp)


def rank_s(sharding: PackSharding, pieces, cp: int, costs: PackCosts) -> np.ndarray:
    """Seconds of every rank as plans price them."""
    packs = packs_of([pieces], cp)
    forward, _ = ranked_packs(packs, packs, [sharding], cp)
    return rank_seconds(costs, forward, "forward").sum(axis=1)


def assert_covers_once(result: RankRanges, start, stop) -> None:
    for piece, (lo, hi) in enumerate(zip(start, stop, strict=True)):
        mine = result.piece == piece
        ranges = sorted(zip(result.start[mine].tolist(), result.stop[mine].tolist(), strict=True))
        assert [a for a, _ in ranges] == [lo, *(b for _, b in ranges[:-1])]
        assert ranges[-1][1] == hi
    assert (result.stop > result.start).all()


@settings(max_examples=150, deadline=None)
@given(PIECES, RANKS, st.sampled_from(RULES))
def test_every_token_is_computed_by_one_rank(pieces, cp, rule) -> None:
    start, stop = columns(pieces)
    for (sharding,) in possible_shardings(rule, costs_of(cp), packs_of([pieces], cp)):
        result = ranges_of(sharding, start, stop, cp)
        assert_covers_once(result, start, stop)
        if isinstance(sharding, str):
            tokens = np.bincount(result.rank, weights=result.stop - result.start, minlength=cp)
            assert tokens.max() - tokens.min() <= 1
        assert 0 <= result.rank.min() <= result.rank.max() < cp


@settings(max_examples=100)
@given(PIECES, RANKS, st.data())
def test_slices_with_an_owner_stay_whole(pieces, cp, data) -> None:
    start, stop = columns(pieces)
    owner = data.draw(st.lists(st.integers(-1, cp - 1), min_size=len(pieces), max_size=len(pieces)))
    result = ranges_of(tuple(owner), start, stop, cp)
    assert_covers_once(result, start, stop)
    for piece in np.flatnonzero(np.array(owner) >= 0):
        assert result.rank[result.piece == piece].tolist() == [owner[piece]]


@settings(max_examples=100, deadline=None)
@given(st.lists(PIECES, min_size=1, max_size=6), RANKS, st.sampled_from(RULES))
def test_many_packs_may_be_shared_as_each_alone(packs, cp, rule) -> None:
    result = possible_shardings(rule, costs_of(cp), packs_of(packs, cp))
    for pack, pieces in enumerate(packs):
        alone = possible_shardings(rule, costs_of(cp), packs_of([pieces], cp))
        assert {way[pack] for way in result} >= {way[0] for way in alone}


def test_rules_offer_what_they_choose_from() -> None:
    """Packs of one rank get nothing; long slices are shared by all, short ones have an owner in groups of any size."""
    forward = SliceColumns(
        np.arange(6, dtype=np.int32),
        np.zeros(6, np.int64),
        np.array([400, 9, 9, 400, 9, 400]),
        np.array([0, 3, 5, 6]),
        np.zeros(3, np.int64),
        np.array([4, 4, 4, 2, 2, 1]),
    )
    fixed = [("per_sequence", "per_sequence", ""), ("per_document", "per_document", "")]
    assert possible_shardings("per_sequence", costs_of(1), forward) == fixed[:1]
    assert possible_shardings("per_document", costs_of(1), forward) == fixed[1:]
    assert possible_shardings("adaptive", costs_of(1), forward) == fixed
    mixed = possible_shardings("mixed", costs_of(1), forward)
    assert mixed[:2] == fixed
    assert mixed[2] == ((-1, 0, 1), (-1, 0), "")
    assert mixed[-1] == ((0, 1, 2), (0, 1), "")
    alone = packs_of([[(0, 5)]], 1)
    assert possible_shardings("mixed", costs_of(1), alone) == [("",)]


def row_by_row_seconds(result: RankRanges, cp: int, work: WorkCurve, tile: int) -> np.ndarray:
    """Compute of every rank, counted one query row at a time. Rows side by side are one range."""
    seconds, result = np.zeros(cp), joined(result)
    for rank, start, stop in zip(result.rank.tolist(), result.start.tolist(), result.stop.tolist(), strict=True):
        rows = [*range(start, stop), *[stop - 1] * (-(stop - start) % tile)]  # incomplete tiles at full price
        seconds[rank] += work.slice_s + work.linear_s * (stop - start)
        for coefficient, window in work.attention_s:
            seconds[rank] += coefficient * sum(min(row + 1, window or row + 1) for row in rows)
    return seconds


WINDOWED = WorkCurve(linear_s=1.0, attention_s=((1e-3, 0), (1e-3, 50)), slice_s=0.5)


@settings(max_examples=60, deadline=None)
@given(PIECES, st.sampled_from([2, 3, 4, 8]), st.sampled_from([1, 8, 64]), st.sampled_from([WORK, WINDOWED]))
def test_seconds_are_those_of_rows_counted_one_by_one(pieces, cp, tile, work) -> None:
    """What is chosen by has closed forms; a wrong one would choose wrongly and still look best by its own figures."""
    costs = costs_of(cp, work, tile)
    for (sharding,) in possible_shardings("mixed", costs, packs_of([pieces], cp)):
        counted = row_by_row_seconds(ranges_of(sharding, *columns(pieces), cp), cp, work, tile)
        assert rank_s(sharding, pieces, cp, costs) == pytest.approx(counted, rel=1e-9)


def test_ranges_and_seconds_by_hand() -> None:
    """10 tokens on 2 ranks: chunks of 3, 3, 2, 2; the two odd tokens go to one rank each."""
    result = ranges_of("per_document", np.array([0]), np.array([10]), 2)
    ranges = sorted(zip(result.rank.tolist(), result.start.tolist(), result.stop.tolist(), strict=True))
    assert ranges == [(0, 0, 3), (0, 8, 10), (1, 3, 6), (1, 6, 8)]
    pairs = [3 * 4 / 2 + (10 * 11 - 8 * 9) / 2, (8 * 9 - 3 * 4) / 2]
    costs = costs_of(2, WorkCurve(linear_s=1.0, attention_s=((0.1, 0),), slice_s=0.5), tile=1)
    # Rank 1's two chunks are one range.
    expected = [5 + 0.1 * pairs[0] + 1.0, 5 + 0.1 * pairs[1] + 0.5]
    assert rank_s("per_document", [(0, 10)], 2, costs) == pytest.approx(expected)
    # Two documents of 4 as one sequence: the second chunk pair lies in the middle, across both.
    sequence = ranges_of("per_sequence", np.array([0, 0]), np.array([4, 4]), 2)
    assert sorted(zip(sequence.rank.tolist(), sequence.piece.tolist(), sequence.start.tolist(), strict=True)) == [
        (0, 0, 0),
        (0, 1, 2),
        (1, 0, 2),
        (1, 1, 0),
    ]


@pytest.mark.parametrize("table", ["github_dirs", "docs", "stdlib", "books"])
@pytest.mark.parametrize("cp", [2, 4, 8])
def test_per_document_rows_are_even_on_real_lengths(table, cp) -> None:
    """max/mean <= 1.002 for one pack of about 256K tokens, with tiles and constants; the last rank, whose two chunks
    are one range, has a little less."""
    with gzip.open(LENGTH_TABLES / f"{table}.npy.gz") as file:
        lengths = np.minimum(np.load(file), 131_072)[:3000].astype(np.int64)
    stop = lengths[: np.searchsorted(np.cumsum(lengths), 262_144)]
    pieces = [(0, length) for length in stop.tolist()]
    # Of llama-7b on H100, microseconds.
    work = WorkCurve(linear_s=0.63, attention_s=((3e-5, 0),), slice_s=1.0)
    for tile in (1, 128):
        seconds = rank_s("per_document", pieces, cp, costs_of(cp, work, tile))
        assert seconds.max() / seconds.mean() <= 1.002


def planner(cp: int, rule: str, link: LinkSpec = FREE, prefix_s: float = 0.0, **changes) -> StepPlanner:
    """Backward takes twice forward in every part, so that one rank is the slowest in both."""
    passes = {
        name: PassCoefficients(
            linear_s_per_token=factor * 1.0, attention_s_per_pair=factor * 0.1, prefix_s_per_token=factor * prefix_s
        )
        for name, factor in (("forward", 1.0), ("backward", 2.0))
    }
    coefficients = sample_coefficients(intra_node=link, devices_per_node=8, **passes, **NO_ENDS, **changes)
    options = PlanOptions(cp_sharding=rule, policy="replay", max_pack_tokens=1000)  # type: ignore[arg-type]
    return StepPlanner(sample_model(num_layers=1), coefficients, even_layout(1, cp=cp), None, options, host="unlimited")


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(1, 90), min_size=1, max_size=8), st.integers(2, 5), st.sampled_from([0.0, 0.5]))
def test_a_pack_takes_what_its_slowest_rank_takes_under_the_rule_and_the_best_is_chosen(lengths, cp, prefix_s):
    """WLB's imbalance is in the predicted time, and packs that nobody waits for have the best of it each."""
    seconds = {}
    for rule in RULES:
        [choice] = planner(cp, rule, prefix_s=prefix_s).propose(0, documents(lengths), "best_fit").choices
        tasks = choice.candidate.tasks
        seconds[rule] = (tasks.forward_s + tasks.backward_s)[:, 0]
    np.testing.assert_allclose(seconds["adaptive"], np.minimum(seconds["per_sequence"], seconds["per_document"]))
    assert (seconds["mixed"] <= seconds["adaptive"] * (1 + 1e-12)).all()


def test_rules_of_sharding_have_times_of_their_own():
    """One long and many short documents, by hand: as one sequence the rank with the long one's end waits for nobody."""
    lengths = [64, *([8] * 8)]
    seconds = {}
    for rule in ("per_sequence", "per_document"):
        [choice] = planner(2, rule).propose(0, documents(lengths), "best_fit").choices
        seconds[rule] = float(choice.candidate.tasks.forward_s.sum())
    # per document: 64 tokens a rank and half of all pairs each.
    assert seconds["per_document"] == pytest.approx(64 + 0.1 * (64 * 65 / 2 + 8 * 36) / 2)
    # As one sequence in chunks of 32: rank 0 has rows 0..31 of the long document and the last four short ones.
    first, second = 32 * 33 / 2, 64 * 65 / 2 - 32 * 33 / 2
    assert seconds["per_sequence"] == pytest.approx(64 + 0.1 * max(first + 4 * 36, second + 4 * 36))


def test_kernels_of_few_rows_behind_many_keys_decide():
    """WLB §5.3: where reading keys costs more than unequal rows, documents are cut into fewer ranges."""
    lengths = [64, *([8] * 8)]
    chosen = [
        planner(2, "adaptive", prefix_s=prefix_s).propose(0, documents(lengths), "best_fit").choices[0].candidate
        for prefix_s in (0.0, 10.0)
    ]
    assert [one.shardings for one in chosen] == [("per_document",), ("per_sequence",)]
