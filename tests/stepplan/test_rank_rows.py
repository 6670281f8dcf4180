"""Rows of every rank of a context-parallel group: covered once, even, the same in both directions and in columns."""

import itertools

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from context_plans import RULES, context_plan, merged_plan
from evenload.cost.pack_pricing import PerRankPacks
from evenload.errors import InvalidPlanError
from evenload.stepplan.cp_rows import PackRows, ranked_packs, replica_rows
from evenload.stepplan.resimulation import replica_columns
from evenload.stepplan.validate import validate_plan
from evenload.types.plan import StepPlan, seal


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 10**6), cp=st.integers(2, 5), rule=st.sampled_from(RULES))
def test_every_token_has_one_rank_and_keeps_it(seed, cp, rule) -> None:
    """What a rank recorded in forward is what it needs in backward: else it would read rows that it does not have."""
    plan = context_plan(seed, cp=cp, rule=rule, tp=2)
    validate_plan(plan)
    for dp_rank in range(plan.layout.dp):
        rows, packs = replica_rows(plan, dp_rank), plan.pack_plans[dp_rank]
        owners = []
        for listed in (packs.forward, packs.backward):
            owner = {}
            for pack in listed:
                result = rows.of_pack(pack)
                assert result is not None
                expected = sorted((s.doc_id, t) for s in pack.slices for t in range(s.start, pack.pad_to or s.stop))
                computed = []
                for rank in range(cp):
                    mine = [(doc, t) for doc, start, stop in result.ranges(rank) for t in range(start, stop)]
                    owner |= dict.fromkeys(mine, rank)
                    computed += mine
                assert sorted(computed) == expected
            owners.append(owner)
        assert owners[0] == owners[1]


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 10**6), cp=st.integers(2, 5))
def test_per_document_ranks_differ_by_one_token_per_document(seed, cp) -> None:
    """In every pack of both directions, however differently they are cut, and for lengths that 2·cp does not divide."""
    plan = context_plan(seed, cp=cp, rule="per_document")
    rows, packs = replica_rows(plan, 0), plan.pack_plans[0]
    for pack in (*packs.forward, *packs.backward):
        result = rows.of_pack(pack)
        assert result is not None
        for piece in result.shared:
            counts = [sum(r.stop - r.start for r in ranges) for ranges in piece.ranges]
            edges = [
                s.start
                for p in (*packs.forward, *packs.backward)
                for s in p.slices
                if s.doc_id == piece.document.doc_id
            ]
            cells = 1 + sum(piece.start < edge < piece.stop for edge in set(edges))
            assert max(counts) - min(counts) <= cells
    for document in rows.documents.values():
        counts = [sum(r.stop - r.start for r in ranges) for ranges in document.ranges]
        if not document.is_cut:
            assert max(counts) - min(counts) <= 1


@given(seed=st.integers(0, 10**6), cp=st.integers(2, 5), data=st.data())
def test_rows_within_and_before_by_counting(seed, cp, data) -> None:
    plan = context_plan(seed, cp=cp, rule="per_document")
    document = data.draw(st.sampled_from(list(replica_rows(plan, 0).documents.values())))
    start = data.draw(st.integers(0, document.num_tokens - 1))
    stop = data.draw(st.integers(start + 1, document.num_tokens))
    for rank, ranges in enumerate(document.within(start, stop)):
        mine = [t for r in document.ranges[rank] for t in range(r.start, r.stop)]
        assert [t for r in ranges for t in range(r.start, r.stop)] == [t for t in mine if start <= t < stop]
        assert all(left.stop < right.start for left, right in itertools.pairwise(ranges))
        assert document.rows_before(rank, start) == sum(t < start for t in mine)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("mixed", "has sharding 'mixed'; choose per_sequence"),
        ("zigzag", "has sharding 'zigzag'; choose per_sequence"),
        ((0, 1, 7), "do not give each of"),
        ((0, 2), "do not give each of"),
    ],
)
def test_what_cannot_be_told_apart_is_refused(rule, message) -> None:
    plan = context_plan(3, cp=2, rule=rule, lengths={0: 5, 1: 9}, whole=True)
    with pytest.raises(InvalidPlanError, match=message):
        replica_rows(plan, 0)


def test_members_that_would_share_rows_differently_are_refused() -> None:
    """They would wait for each other at transfers of different sizes."""
    plan = merged_plan(0, dp=2, tp=2)
    validate_plan(plan)
    last = plan.pack_plans[1]
    shared = [pack for pack in last.forward if pack.sharding]
    assert shared
    other = tuple(
        msgspec.structs.replace(pack, sharding="per_sequence") if pack is shared[0] else pack for pack in last.forward
    )
    broken = msgspec.structs.replace(
        plan, pack_plans=(plan.pack_plans[0], msgspec.structs.replace(last, forward=other))
    )
    with pytest.raises(InvalidPlanError, match="different orders or shardings"):
        validate_plan(seal(broken))


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 10**6), cp=st.integers(2, 5), rule=st.sampled_from(RULES))
def test_rows_are_those_that_the_runtime_computes(seed, cp, rule) -> None:
    require_equal_rows(context_plan(seed, cp=cp, rule=rule))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), dp=st.sampled_from([2, 4]), cp=st.integers(1, 2), rule=st.sampled_from(RULES))
def test_rows_under_dp_merge_too(seed, dp, cp, rule) -> None:
    require_equal_rows(merged_plan(seed, dp=dp, cp=cp, rule=rule))


def require_equal_rows(plan: StepPlan) -> None:
    doc_ids = [document.doc_id for document in plan.documents]
    for dp_rank, packs in enumerate(plan.pack_plans):
        rows, columns = replica_rows(plan, dp_rank), replica_columns(plan, dp_rank)
        shardings = [pack.sharding for pack in packs.forward]
        result = ranked_packs(columns.forward, columns.backward, shardings, plan.layout.cp)
        for ranked, listed in zip(result, (packs.forward, packs.backward), strict=True):
            for index, pack in enumerate(listed):
                expected = rows.of_pack(pack)
                if expected is None:
                    assert ranked.num_ranks()[index] == 1
                    assert of_rank(ranked, index, 0, doc_ids) == sorted(
                        (piece.doc_id, piece.start, piece.stop, False) for piece in pack.slices
                    )
                else:
                    require_equal_pack(ranked, index, expected, doc_ids)


def require_equal_pack(ranked: PerRankPacks, index: int, expected: PackRows, doc_ids: list[int]) -> None:
    ranks = len(expected.local)
    assert ranked.num_ranks()[index] == ranks
    for rank in range(ranks):
        shared = [(*own, False) for piece in expected.shared for own in piece.ranges[rank]]
        local = [(*own, True) for own in expected.local[rank]]
        assert of_rank(ranked, index, rank, doc_ids) == sorted(shared + local)
    for is_cut, tokens in ((False, ranked.whole_tokens), (True, ranked.cut_tokens)):
        sent = [piece.stop - piece.start for piece in expected.shared if piece.document.is_cut == is_cut]
        assert tokens[index] == sum(sent)


def of_rank(ranked: PerRankPacks, pack: int, rank: int, doc_ids: list[int]) -> list[tuple[int, int, int, bool]]:
    """(document, start, stop, whole on the rank) of its ranges, sorted."""
    rows, at = ranked.rows, int(ranked.first_rank[pack]) + rank
    chosen = slice(*rows.pack_offset[at : at + 2].tolist())
    docs = [doc_ids[doc] for doc in rows.doc[chosen].tolist()]
    columns = (rows.start[chosen].tolist(), rows.stop[chosen].tolist(), ranked.is_local[chosen].tolist())
    return sorted(zip(docs, *columns, strict=True))
